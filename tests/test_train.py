"""Training: the LK loss, the optimizer, batches and anchors, and that stages learn, stop and go on."""

import csv
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tfm import checkpoints
from tfm.drafter import Drafter, init_drafter
from tfm.target import Target
from tfm.train import corpus, drafter, export, run, sample, sampler, target, weaver
from tfm.train.blocks import compute_blocks, keep_outputs
from tfm.train.layout import Layout
from tfm.train.loop import Deadline
from tfm.train.rows import Rows, fill_buckets, split_text
from tfm.train.settings import load_settings
from tfm.train.text import TokenisedText
from tfm.weaver import Weaver

REPOSITORY = Path(__file__).parents[1]
NANO = REPOSITORY / "workflows" / "config" / "train_nano.yaml"
TINY_TEXT = REPOSITORY / "tfm" / "data" / "tiny-train.jsonl"
VOCAB = 400


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_config() -> dict:
    """The nano recipe at a size that trains in seconds on the tiny text."""
    config = yaml.safe_load(NANO.read_text())
    config["text"] = {"vocab_size": VOCAB, "buckets": [64, 128], "held_out_every": 8}
    config["target"]["model"] |= {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    config["sample"] = {"conversations": 60, "requests": 32, "max_prompt_tokens": 64, "max_new_tokens": 24}
    config["drafter"]["model"] |= {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "block_size": 5}
    config["drafter"]["model"]["dflash_config"]["target_layer_ids"] = [0, 1]
    config["weaver"]["model"] |= {"d_model": 32, "d_embed": 32, "d_rank": 16, "mlp_dim": 16, "K": 4}
    config["weaver"]["model"]["candidate_pool_size"] = 32
    for stage, steps in (("target", 60), ("drafter", 80), ("weaver", 60)):
        config[stage]["train"] = {
            "steps": steps,
            "tokens_per_step": 512,
            "warmup_steps": 5,
            "log_every": 10,
            "validate_every": 20,
            "muon_lr": 0.02,
            "adam_lr": 0.01,
        }
        config[stage].get("loss", {})["anchors"] = 4
    return config


def write_config(folder: Path, config: dict) -> Path:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny family, trained once through the driver: (settings, layout, driver report)."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("train")
    settings = load_settings(write_config(folder, tiny_config()))
    layout = Layout(folder / "out", TINY_TEXT)
    stages = list(run.STAGES)
    return settings, layout, run.run_stages(settings, layout, stages, device="cpu", deadline=Deadline(None))


def curve_of(layout: Layout, stage: str) -> list[dict]:
    with (layout.stage(stage) / "curve.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# rows, anchors, blocks


def test_batches_depend_on_seed_and_step_alone():
    rows = [(np.arange(3, 3 + length, dtype=np.uint16), 2) for length in (5, 9, 16, 12, 8)]
    first, again = (Rows(fill_buckets(rows, (8, 16), "cpu"), seed=4) for _ in range(2))
    for step in (0, 7, 3):
        one, two = first.batch(step, 32, anchors=3), again.batch(step, 32, anchors=3)
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert (one["anchors"] >= one["starts"][:, None]).all()
        assert (one["anchors"] <= one["lengths"][:, None] - 2).all()
        assert one["tokens"].numel() in (32, 32 // 8 * 8)


def test_no_conversation_is_in_both_splits():
    tokens = np.random.default_rng(0).integers(6, 90, 3000).astype(np.uint16)
    offsets = np.arange(0, 3001, 30)
    text = TokenisedText(tokens, np.ones(3000, dtype=bool), offsets, np.zeros(100, dtype=np.uint8))
    kept, held = split_text(text, buckets=(16, 32), held_out_every=5, seed=0, device="cpu")
    sides = [{tuple(row.tolist()) for bucket in side.buckets for row in bucket.tokens} for side in (kept, held)]
    assert len(sides[0]) + len(sides[1]) == 100 and len(sides[1]) > 5 and not sides[0] & sides[1]


def test_rows_of_a_block_meet_the_targets_law_after_the_same_tokens():
    settings = tiny_settings()
    model = Target(settings.target_model, tap_layers=(0, 1))
    target.init_target(model, 0)
    draft = Drafter(settings.drafter_model)
    init_drafter(draft, 0)
    tokens = torch.randint(6, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "lengths": torch.tensor([12, 9]), "anchors": torch.tensor([[3, 7], [2, 7]])}
    blocks = compute_blocks(model, draft, batch, train_drafter=False)
    with torch.no_grad():
        full = model(tokens)
    assert blocks.valid[0, 1].tolist() == [True] * 4 and blocks.valid[1, 1].tolist() == [True] + [False] * 3
    for row in range(4):
        assert torch.equal(blocks.tokens[0, 0, row], tokens[0, 4 + row])
        assert torch.equal(blocks.inputs[0, 0, row], tokens[0, 3 + row])
        torch.testing.assert_close(blocks.target_logits[0, 0, row], full.logits[0, 3 + row])
    torch.testing.assert_close(blocks.target_hidden[1, 0], full.hidden[1, 1])
    cache = draft.new_cache(1, 12)
    draft.append(full.taps[:1, :3], torch.tensor([3]), cache)
    logits, _ = draft.draft(tokens[:1, 3], cache, model)
    torch.testing.assert_close(blocks.draft_logits[0, 0], logits[0], rtol=1e-4, atol=1e-5)


def tiny_settings():
    with tempfile.TemporaryDirectory() as folder:
        return load_settings(write_config(Path(folder), tiny_config()))


# sampling


def test_sampling_walks_the_target_and_stops_at_eos(monkeypatch):
    model = Target(tiny_settings().target_model)
    target.init_target(model, 3)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(40)  # far from uniform
    monkeypatch.setattr(sampler, "draw", lambda logits, generator: logits.argmax(-1))
    prompts = [np.array([7, 8, 9]), np.array([20, 21, 22, 23, 24])]
    expected = []
    for prompt in prompts:
        tokens = prompt.tolist()
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    assert sample.sample_answers(model, prompts, end=2, cap=6, seed=0) == expected
    eos = expected[0][2]
    cut = sample.sample_answers(model, prompts, end=eos, cap=6, seed=0)
    assert cut[0] == expected[0][: expected[0].index(eos) + 1]


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    drawn = sampler.draw(logits, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    # three standard errors of a share at n = 20,000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.011)


def test_kept_outputs_change_no_block(trained):
    settings, layout, _ = trained
    frozen = target.load_frozen(settings, layout, "cpu")
    model = checkpoints.load_drafter(layout.weights("drafter"))
    rows, _ = sample.split_samples(sample.Samples.load(layout.samples), settings, "cpu")
    plain = [rows.batch(step, 512, 4) for step in range(4)]
    keep_outputs(frozen, rows, 512)
    for step, batch in enumerate(plain):
        kept = rows.batch(step, 512, 4)
        assert set(kept) - set(batch) == {"hidden", "taps"} and torch.equal(kept["tokens"], batch["tokens"])
        mine, wanted = (compute_blocks(frozen, model, each, train_drafter=False) for each in (kept, batch))
        for name, value in vars(wanted).items():
            torch.testing.assert_close(getattr(mine, name), value, rtol=1e-4, atol=1e-4)


def test_the_last_answer_starts_after_the_last_prompt():
    assert sample.last_answer_start(np.array([0, 1, 1, 0, 0, 1], dtype=bool)) == 5
    assert sample.last_answer_start(np.zeros(3, dtype=bool)) == 0


# whole runs


def test_driver_finishes_every_stage_and_says_so(trained):
    _, layout, report = trained
    assert report["done"] == list(run.STAGES) and report["remaining"] == []
    assert json.loads(json.dumps(report)) == report
    for part, load in (
        ("target", checkpoints.load_target),
        ("drafter", checkpoints.load_drafter),
        ("weaver", checkpoints.load_weaver),
    ):
        assert sum(p.numel() for p in load(layout.weights(part)).parameters()) == export.parameter_count(
            layout.weights(part)
        )


def test_losses_fall_and_acceptance_rises(trained):
    _, layout, _ = trained
    rows = curve_of(layout, "target")
    assert float(rows[-1]["val_loss"]) < float(rows[1]["val_loss"]) - 0.1 < 6
    rows = curve_of(layout, "drafter")
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert float(rows[-1]["alpha"]) > float(rows[0]["alpha"]) + 0.02
    rows = curve_of(layout, "weaver")
    assert float(rows[-1]["val_alpha"]) > float(rows[1]["val_alpha"])
    assert {"val_alpha_1", "val_alpha_4", "marginal_val_alpha_1", "val_chain"} <= set(rows[-1])


def test_a_second_call_does_nothing_but_report(trained):
    settings, layout, _ = trained
    before = {
        path: path.stat().st_mtime_ns for path in layout.stage("sample").iterdir() if path.name.startswith("part")
    }
    report = run.run_stages(settings, layout, list(run.STAGES), device="cpu", deadline=Deadline(None))
    assert report["done"] == list(run.STAGES)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_card_names_data_licences_and_hashes(trained):
    _, layout, _ = trained
    card = (layout.exported / "README.md").read_text()
    digest = export.sha256_file(layout.weights("target") / "model.safetensors")
    for text in ("alpaca_eval:*", "chat_sharealike", digest, "Apache-2.0", "target/tokenizer.json", "tiny"):
        assert text in card
    assert (layout.exported / "drafter_curve.csv").is_file()


def test_promotion_copies_what_loads(trained, tmp_path):
    _, layout, _ = trained
    copied = export.promote(layout.exported, tmp_path / "tiny")
    assert {"README.md", "target/tokenizer.json", "weaver/model.safetensors"} <= set(copied)
    checkpoints.load_drafter(tmp_path / "tiny" / "drafter")


@pytest.mark.parametrize("stage", ["target", "drafter", "weaver"])
def test_stopped_and_continued_equals_uninterrupted(trained, tmp_path, stage):
    settings, layout, _ = trained
    module = {"target": target, "drafter": drafter, "weaver": weaver}[stage]
    short = replace(settings, **{stage: replace(getattr(settings, stage), steps=8, decay_fraction=0.25, log_every=3)})
    states = []
    for name, stops in (("once", [8]), ("twice", [4, 8])):
        own = copy_inputs(layout, tmp_path / name)
        for steps in stops:
            staged = replace(short, **{stage: replace(getattr(short, stage), steps=steps)})
            # a run that stops at step 4 still has all its steps ahead: no decay yet
            if steps != 8:
                staged = replace(staged, **{stage: replace(getattr(staged, stage), decay_fraction=0.0)})
            module.run(staged, own, device="cpu", deadline=Deadline(None))
        states.append(torch.load(own.stage(stage) / "state.pt", weights_only=True))
    assert states[0]["step"] == states[1]["step"] == 8
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][name]), name


def copy_inputs(layout: Layout, root: Path) -> Layout:
    """A new run folder with the text, the samples and the weights of `layout`, but no training state."""
    shutil.copytree(layout.root, root, ignore=shutil.ignore_patterns("state.pt", "curve.csv"))
    return Layout(root, layout.data)


def test_spent_time_stops_cleanly_and_says_what_remains(trained, tmp_path):
    settings, layout, _ = trained
    own = copy_inputs(layout, tmp_path / "late")
    report = target.run(settings, own, device="cpu", deadline=Deadline(0.0))
    assert report["done"] is False and report["step"] == 0 and (own.stage("target") / "state.pt").is_file()
    report = run.run_stages(settings, own, ["target", "sample"], device="cpu", deadline=Deadline(0.0))
    assert report == {"done": [], "remaining": ["target", "sample"], "reports": []}


def test_checkpoint_of_other_settings_is_refused(trained):
    settings, layout, _ = trained
    other = replace(settings, drafter=replace(settings.drafter, muon_lr=0.5))
    with pytest.raises(ValueError, match="made with other settings than the drafter stage has now"):
        drafter.run(other, layout, device="cpu", deadline=Deadline(None))


def test_stage_without_its_inputs_names_the_stage_to_run(tmp_path):
    with pytest.raises(ValueError, match="run the sample stage first"):
        drafter.run(tiny_settings(), Layout(tmp_path, None), device="cpu", deadline=Deadline(None))


def test_tokenizer_that_disagrees_with_the_config_is_refused(tmp_path):
    config = tiny_config()
    config["drafter"]["model"]["dflash_config"]["mask_token_id"] = 9
    settings = load_settings(write_config(tmp_path, config))
    with pytest.raises(ValueError, match="mask_token_id: 9 is not allowed"):
        corpus.run(settings, Layout(tmp_path / "out", TINY_TEXT), device="cpu", deadline=Deadline(None))


# settings


def test_nano_fits_its_limit():
    settings = load_settings(NANO)
    with torch.device("meta"):
        models = (Target(settings.target_model), Drafter(settings.drafter_model), Weaver(settings.weaver_model))
    assert sum(p.numel() for model in models for p in model.parameters()) * 2 <= 4_900_000
    assert settings.max_bytes == 5 * 2**20 and settings.drafter_model.block_size == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(colour=1), "unknown key colour"),
        (lambda c: c["target"]["train"].update(speed=1), "target.train: unknown key speed"),
        (lambda c: c["weaver"]["model"].update(K=3), "weaver.model.K: 3 is not allowed"),
        (lambda c: c["drafter"]["model"].update(hidden_size=64), "drafter.model.hidden_size: 64 is not allowed"),
        (lambda c: c["drafter"]["model"]["dflash_config"].update(target_layer_ids=[0, 7]), r"target_layer_ids: \[7\]"),
        (lambda c: c["target"]["train"].pop("steps"), "target.train: .*steps"),
    ],
    ids=["unknown_key", "unknown_train_key", "weaver_rows", "width", "tap_outside", "missing_steps"],
)
def test_bad_settings_are_errors_naming_the_key(tmp_path, change, message):
    config = tiny_config()
    change(config)
    with pytest.raises(ValueError, match=message):
        load_settings(write_config(tmp_path, config))
