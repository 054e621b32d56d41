"""The static engine on a CUDA device: each form alone, all together, captured in graphs, against the reference loop."""

import pytest
import torch
from engine_models import assert_same_records, make_engine, prompts_of, random_family, run_reference, run_static

from baselines.loading import load_models
from tfm.config import DecodeConfig
from tfm.decode import Models
from tfm.trace import STAGES

pytestmark = pytest.mark.gpu
NANO = "tfm/weights/nano"
FORMS = ("attention", "rows", "sampling", "growth", "linear")
SETTINGS = {
    "ar": {},
    "dflash": {},
    "ddtree": dict(budget=64),
    "dartree": dict(budget=64, width=12),
    "tfm": dict(budget=64),
}


@pytest.fixture(scope="module")
def nano():
    parts = {part: f"{NANO}/{part}" for part in ("target", "drafter", "weaver")}
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_models(parts, device=torch.device("cuda"), dtype=torch.float32)


def settings_of(name, **more):
    # solve_triangular may leave the stream, which a capture forbids; nano's heads are too small for the fused kernels
    base = {"method": name, "max_new_tokens": 32, "seed": 3, "gdn_backend": "recurrent_triton"}
    return DecodeConfig(**{**base, **SETTINGS[name], **more})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_graphs_replay_what_the_reference_loop_does(nano, name, temperature):
    """flashinfer#5015, FastDeploy#7934 (C080): every step replays another tree; three requests in one memory."""
    config, prompts = settings_of(name, temperature=temperature), prompts_of(nano)
    expected = run_reference(nano, config, prompts)
    assert_same_records(run_static(nano, config, prompts, graphs=True), expected, log_prob_tolerance=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dflash", "ddtree", "dartree", "tfm"])
def test_each_fast_form_alone_changes_nothing(nano, name, form):
    config, prompts = settings_of(name), prompts_of(nano)
    expected = run_reference(nano, config, prompts)
    assert_same_records(run_static(nano, config, prompts, **{form: "triton"}), expected, log_prob_tolerance=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_all_fast_forms_in_graphs_change_nothing(nano, name, temperature):
    config, prompts = settings_of(name, temperature=temperature), prompts_of(nano)
    expected = run_reference(nano, config, prompts)
    forms = {"graphs": True, **dict.fromkeys(FORMS, "triton")}
    assert_same_records(run_static(nano, config, prompts, **forms), expected, log_prob_tolerance=1e-4)


@pytest.mark.parametrize("name", ["ar", "tfm"])
def test_a_prefill_in_chunks_changes_no_record(nano, name):
    config, prompts = settings_of(name), prompts_of(nano, (200, 5, 128))
    forms = {"graphs": True, "ahead": True, "prefill": "chunks", **dict.fromkeys(FORMS, "triton")}
    expected = run_reference(nano, config, prompts)
    assert_same_records(run_static(nano, config, prompts, **forms), expected, log_prob_tolerance=1e-4)


def wide_family() -> Models:
    """Heads of 128 as the CUDA mixer takes them, in bf16."""
    models = random_family(hidden=256, head_dim=128, gdn_dim=128, heads=(4, 2), gdn_heads=(4, 12), vocab=512, block=16)
    parts = (models.target, models.drafter, models.weaver)
    return Models(*(part.to("cuda", torch.bfloat16) for part in parts))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_cuda_mixer_decodes_alike_in_graphs_and_out_of_them(name):
    """The same kernels on the same rows: not a bit may differ."""
    models = wide_family()
    config = settings_of(name, gdn_backend="fused_cuda")
    prompts = prompts_of(models)
    forms = dict.fromkeys(FORMS, "triton")
    eager, replayed = (run_static(models, config, prompts, graphs=graphs, **forms) for graphs in (False, True))
    assert_same_records(replayed, eager, log_prob_tolerance=0.0)


def test_the_cuda_mixer_verifies_what_the_plain_layers_verify():
    """One step's logits in bf16: as close to each other as rounding to bf16 lets them be."""
    models, rows = wide_family(), []
    prompts = prompts_of(models, (60,))
    for backend in ("solve", "fused_cuda"):
        config = settings_of("tfm", gdn_backend=backend)
        engine = make_engine(models, config, prompts)
        with torch.inference_mode():
            engine.step.prefill(prompts[0].tokens, 0, engine._first_token)
            engine.step.propose()
            engine.step.verify()
            first = engine.step._output.logits.float()
            engine.step.commit()
        rows.append((first, [state.state.clone() for state in engine.step.target.states()]))
    (plain, states), (mixed, others) = rows
    assert (plain - mixed).abs().max() < 0.05 * plain.abs().max()
    for one, other in zip(states, others, strict=True):
        assert (one - other).abs().max() < 0.05 * one.abs().max()


def test_stages_inside_a_graph_are_timed_at_every_replay(nano):
    config, done = settings_of("tfm"), []
    engine = make_engine(nano, config, prompts_of(nano), clock="stages", graphs=True)
    engine.decode(prompts_of(nano), on_finish=done.append)
    for step in done[-1].steps:
        assert all(step.stage_us[name] > 0 for name in STAGES if name != "other")
        assert step.stage_us["target_gdn"] > 0 and step.stage_us["grow"] > 0
        parts = sum(value for name, value in step.stage_us.items() if name.startswith("target_"))
        assert parts == pytest.approx(step.stage_us["verify"], rel=1e-3)
