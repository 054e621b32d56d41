"""Training at size: checked forms of the delta rule, bfloat16 with float32 weights, int8 exports, processes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from test_train import TINY_TEXT, VOCAB, copy_inputs, curve_of, tiny_config, tiny_settings, write_config

from tfm import checkpoints
from tfm.drafter import Drafter
from tfm.quantise import pack
from tfm.target import Target
from tfm.train import calibrate, gdn, run, speed, target
from tfm.train.layout import Layout
from tfm.train.loop import Deadline
from tfm.train.peers import Peers
from tfm.train.precision import Shadow, lower
from tfm.train.rows import Rows, fill_buckets
from tfm.train.settings import load_settings
from tfm.weaver import Weaver
from tfm_kernels.gdn import solve

REPOSITORY = Path(__file__).parents[1]
STEPS = 12


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def short_config(**keys) -> dict:
    config = tiny_config() | keys
    for stage in ("target", "drafter", "weaver"):
        config[stage]["train"] |= {"steps": STEPS, "log_every": 1, "validate_every": STEPS}
    return config


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A tiny family in bfloat16, blocked form and int8 storage: (config path, settings, layout, driver report)."""
    folder = tmp_path_factory.mktemp("mixed")
    path = write_config(folder, short_config(precision="bfloat16", gdn="blocked", storage="int8"))
    settings, layout = load_settings(path), Layout(folder / "out", TINY_TEXT)
    report = run.run_stages(settings, layout, list(run.STAGES), device="cpu", deadline=Deadline(None))
    return path, settings, layout, report


# forms of the delta rule


@pytest.mark.parametrize("name", ["solve", "blocked"])
def test_forms_have_the_recurrence_gradient_at_the_published_head_sizes(name):
    # float32 products: far below the tolerance that TF32 needs
    assert max(gdn.check_gradients(name, "cpu").values()) < 2e-6


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_blocked_form_equals_the_plain_one(length):
    *rows, state = gdn._check_inputs(8, length)
    state = torch.randn(state.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for mine, plain in zip(gdn.blocked_chain(*rows, state), solve.chain_forward(*rows, state), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12)


def test_a_form_with_a_wrong_gradient_is_refused_by_name(monkeypatch):
    def wrong(q, k, v, log_decay, beta, state):
        # right values, gradient of the decay lost: what a fused kernel has been seen to do
        return solve.chain_forward(q, k, v, log_decay.detach() + 0 * log_decay, beta, state)

    monkeypatch.setitem(gdn.FORMS, "blocked", wrong)
    with pytest.raises(ValueError, match="gdn: 'blocked' fails its gradient check on cpu .*log_decay 1.00e"):
        gdn.use_form(Target(tiny_settings().target_model), "blocked", "cpu")


def test_a_cuda_form_on_a_cpu_names_the_remedy():
    with pytest.raises(ValueError, match="'fla' needs the package fla-core and --device cuda.*use gdn: blocked"):
        gdn.use_form(Target(tiny_settings().target_model), "fla", "cpu")


# bfloat16 with float32 weights


def test_gradients_of_the_bfloat16_copy_are_those_of_the_model_within_its_rounding():
    model = Target(tiny_settings().target_model)
    target.init_target(model, 0)
    tokens = torch.randint(6, VOCAB, (4, 48), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "lengths": torch.full((4,), 48)}
    target.target_loss(model, batch).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    shadow = Shadow(model, "bfloat16")
    model.zero_grad(set_to_none=False)
    shadow.pull()
    target.target_loss(shadow.compute, batch).backward()
    shadow.push()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = float((parameter.grad - exact[name]).norm() / exact[name].norm())
        # bfloat16 keeps 8 bits; a few layers of it
        assert error < 0.05, f"{name}: {error}"


def test_norms_and_decays_stay_float32_in_the_copy():
    kinds = {name: p.dtype for name, p in lower(Target(tiny_settings().target_model)).named_parameters()}
    assert kinds["layers.0.linear_attn.A_log"] == kinds["norm.weight"] == torch.float32
    assert kinds["layers.0.linear_attn.conv1d.weight"] == kinds["embed_tokens.weight"] == torch.bfloat16


def test_mixed_run_follows_the_float32_one(mixed, tmp_path):
    _, settings, layout, report = mixed
    assert report["done"] == list(run.STAGES)
    own = copy_inputs(layout, tmp_path / "plain")
    plain = replace(settings, precision="float32", gdn="solve", storage="bfloat16")
    target.run(plain, own, device="cpu", deadline=Deadline(None))
    for one, other in zip(curve_of(layout, "target"), curve_of(own, "target"), strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=5e-3)


def test_int8_family_is_what_was_trained_against_and_exports_to_the_same_model(mixed, tmp_path):
    _, settings, layout, report = mixed
    stored = load_file(layout.weights("target") / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.int8
    assert report["reports"][-1]["parameters"]["target"] == sum(
        p.numel() for p in Target(settings.target_model).parameters()
    )
    card = (layout.exported / "README.md").read_text()
    assert "int8 rows with a float16 scale" in card
    checkpoints.export(layout.weights("target"), tmp_path / "public")
    frozen = target.load_frozen(settings, layout, "cpu")
    public = checkpoints.load_target(tmp_path / "public", dtype=torch.bfloat16)
    assert all(torch.equal(frozen.state_dict()[name], tensor) for name, tensor in public.state_dict().items())


# several processes


def test_processes_share_each_batch_without_overlap():
    rows = [(torch.arange(3, 3 + length).numpy().astype("uint16"), 2) for length in (5, 9, 16, 12, 8, 14)]
    batches = Rows(fill_buckets(rows, (16,), "cpu"), seed=4)
    whole = batches.batch(3, 16 * 5, anchors=2)
    parts = [batches.batch(3, 16 * 5, anchors=2, peers=Peers(rank, 2)) for rank in (0, 1)]
    for name, tensor in whole.items():
        assert torch.equal(tensor[0::2], parts[0][name]) and torch.equal(tensor[1::2], parts[1][name])
    with pytest.raises(ValueError, match="tokens_per_step: 16 makes 1 rows for 2 processes"):
        batches.batch(3, 16, peers=Peers(0, 2))


def test_two_processes_have_the_loss_curves_of_one(tmp_path):
    config = short_config()
    for stage in ("target", "drafter", "weaver"):
        config[stage]["train"]["tokens_per_step"] = 128 * 5  # rows that two processes cannot share evenly
    path = write_config(tmp_path, config)
    settings, base = load_settings(path), Layout(tmp_path / "base", TINY_TEXT)
    run.run_stages(settings, base, list(run.STAGES), device="cpu", deadline=Deadline(None))
    # backwards: each stage then starts from the very weights that the one process started from
    stages = ["weaver", "drafter", "target"]
    own = copy_inputs(base, tmp_path / "two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tfm.train.run", "--config", str(path), "--out", str(own.root), "--stages", ",".join(stages)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('"done": ["weaver", "drafter", "target"]') == 1
    for stage in stages:
        one, two = curve_of(base, stage), curve_of(own, stage)
        assert [row["step"] for row in two] == [row["step"] for row in one]
        for name in {"loss", "alpha", "kl", "kl_weight", "val_loss"} & set(one[0]):
            found, wanted = ([float(row[name]) for row in curve if row[name]] for curve in (two, one))
            # float32 sums in another order, over twelve steps
            assert found == pytest.approx(wanted, rel=2e-5, abs=1e-5), f"{stage} {name}"


# tools before a run


def test_calibration_sharpens_on_top_of_what_was_exported(mixed):
    _, settings, layout, _ = mixed
    rows = calibrate.calibrate(settings, layout, [1.0, 3.0], conversations=12, tokens=16, device="cpu")
    assert [row["factor"] for row in rows] == [1.0, 3.0]
    assert rows[1]["entropy_nats"] < rows[0]["entropy_nats"] and rows[1]["first_choice"] >= rows[0]["first_choice"]
    assert 0 < rows[0]["greedy_chain"] < rows[1]["greedy_chain"] <= calibrate.CHAIN


def test_greedy_chain_is_the_sum_of_its_path_probabilities():
    model = Target(tiny_settings().target_model)
    target.init_target(model, 3)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(40)  # far from uniform
    tokens, anchors = torch.randint(6, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0)), torch.tensor([3, 8])
    found = calibrate.greedy_chain(model, tokens, anchors)
    for row, anchor, length in zip(tokens.tolist(), anchors.tolist(), found.tolist(), strict=True):
        path, probability, wanted = row[: anchor + 1], 1.0, 0.0
        for _ in range(calibrate.CHAIN):
            with torch.no_grad():
                law = model(torch.tensor([path])).logits[0, -1].softmax(-1)
            probability *= float(law.max())
            wanted += probability
            path.append(int(law.argmax()))
        assert length == pytest.approx(wanted, rel=1e-4)


def test_speed_times_every_length_with_the_forms_that_run_here(mixed):
    _, settings, _, _ = mixed
    rows = speed.time_variant(settings, "cpu", graphs=False, steps=1)
    assert [row["length"] for row in rows] == list(settings.text.buckets)
    assert all(row["tokens_per_second"] > 0 and row["loss"] > 0 for row in rows)


def test_mini_fits_eleven_mebibytes_and_can_be_widened():
    settings = load_settings(REPOSITORY / "workflows" / "config" / "train_mini.yaml")
    models = (Target(settings.target_model), Drafter(settings.drafter_model), Weaver(settings.weaver_model))
    weights = sum(len(save(pack(model.state_dict()))) for model in models)
    # an 8k tokenizer has 225 kB, the configs 5; card and curves have what is left
    assert weights + 230_000 < settings.max_bytes < 11 * 2**20 - 60_000
    target_model, draft = settings.target_model, settings.drafter_model
    assert 5120 % target_model.hidden_size == 0 and 2048 % settings.weaver_model.d_rank == 0
    assert target_model.num_attention_heads <= 24 // 4 and draft.num_attention_heads <= 32 // 8
    assert target_model.linear_num_value_heads == 3 * target_model.linear_num_key_heads
    assert target_model.layer_types == (*["linear_attention"] * 3, "full_attention") * 2
    # layer i of 8 goes to a layer of 64 of its kind, and every tap's layer before the next tap's
    assert place_layers(target_model.layer_types, draft.target_layer_ids, (1, 16, 31, 46, 61))


def place_layers(kinds: tuple[str, ...], taps: tuple[int, ...], bounds: tuple[int, ...]) -> list[int]:
    """Return the first layers of the 64 that hold `kinds` in order with tap i's layer at most at bounds[i]; or []."""
    placed, at = [], 0
    for layer, kind in enumerate(kinds):
        # a layer behind tap i stands behind the 27B's tap i, or it would change what is read there
        at = max([at, *(bound + 1 for tap, bound in zip(taps, bounds, strict=True) if layer > tap)])
        while (at % 4 == 3) != (kind == "full_attention"):
            at += 1
        placed.append(at)
        at += 1
    fits = all(placed[tap] <= bound for tap, bound in zip(taps, bounds, strict=True))
    return placed if fits and placed[-1] < 64 else []
