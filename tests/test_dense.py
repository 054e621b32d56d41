"""Dense targets (Qwen3, Llama): equal to transformers in every pass, lossless under every method, refused by name."""

import json

import pytest
import torch
from test_target import draw_tokens, path_to, prefilled, random_tree

from baselines.methods import METHODS, resolve
from tfm import checkpoints
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode
from tfm.drafter import Drafter, DrafterConfig, init_drafter
from tfm.heads import HeadConfig, build_head, init_head
from tfm.target import Target
from tfm.target_config import TargetConfig
from tfm.tree import DraftTree
from tfm.weaver import Weaver, WeaverConfig, init_weaver

transformers = pytest.importorskip("transformers")

VOCAB, WIDTH = 128, 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {  # wavelengths below 8, between, and above 32 all occur with 12 channels
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3_tied": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3_one_kv_head": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3_window_switched_off": ("Qwen3", {"head_dim": 16, "sliding_window": 4, "use_sliding_window": False}),
    "llama": ("Llama", {}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_no_grouping_tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}
SETTINGS = {
    "ar": {},
    "dflash": {},
    "ddtree": {"budget": 24},
    "headchain": {"candidates": 16},
    "headddtree": {"budget": 24, "candidates": 16},
    "dartfixed": {"budget": 24, "candidates": 16},
    "overgrown": {"budget": 24, "candidates": 16, "width": 4},
    "heap": {"budget": 24, "candidates": 16, "depth_bonus": -0.2},
    "dartree": {"budget": 24, "candidates": 16, "depth_bonus": -0.2},
    "tfm": {"budget": 24, "candidates": 16},
    "adaptive": {"budget": 24, "candidates": 16},
}


def reference_model(shape: str, seed: int = 0):
    """A random transformers model, its matrices large enough for attention to matter."""
    family, changes = SHAPES[shape]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(4)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model.requires_grad_(False)


def saved(shape: str, folder, **options):
    model = reference_model(shape)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers_in_prefill_step_and_every_path_of_a_random_tree(shape, tmp_path):
    reference = saved(shape, tmp_path)
    target = checkpoints.load_target(tmp_path, tap_layers=(0, 2))
    prompt = draw_tokens(1, 40, seed=3)
    expected = reference(prompt, output_hidden_states=True)
    cache = target.new_cache(1, 80)
    output = target.prefill(prompt, torch.tensor([40]), cache)
    assert (output.logits[0, 0] - expected.logits[0, -1]).abs().max() < 1e-4
    assert (output.hidden[0, 0] - expected.hidden_states[-1][0, -1]).abs().max() < 1e-4
    assert (output.taps[0, :, :WIDTH] - expected.hidden_states[1][0]).abs().max() < 1e-4
    tree = random_tree(20, seed=5)
    verified = target.verify(tree, cache)
    for node in range(20):
        line = torch.cat([prompt, tree.tokens[:, path_to(tree, node)]], dim=1)
        assert (verified.logits[0, node] - reference(line).logits[0, -1]).abs().max() < 1e-4
    path = path_to(tree, 19)
    cache.commit(verified.scratch, torch.tensor([path]))
    line = torch.cat([prompt, tree.tokens[:, path], torch.tensor([[7]])], dim=1)
    after = target.verify(DraftTree.root_only(torch.tensor([7])), cache)
    assert (after.logits[0, 0] - reference(line).logits[0, -1]).abs().max() < 1e-4


def test_the_scaled_rotary_positions_of_llama_3_matter_and_have_three_regimes():
    """Guards the test above: with plain positions the logits differ, and no regime of the formula is idle."""
    scaled, plain = reference_model("llama3_rope"), reference_model("llama")
    tokens = draw_tokens(1, 60)
    assert (scaled(tokens).logits - plain(tokens).logits).abs().max() > 1e-2
    config = TargetConfig.from_dict(scaled.config.to_dict())
    frequencies = 1e4 ** -(torch.arange(0, 12, 2) / 12)
    ratio = config.rope_scaling.scale(frequencies) / frequencies
    assert ratio[0] == 1 and torch.isclose(ratio[-1], torch.tensor(1 / 8)) and ((ratio > 0.13) & (ratio < 0.99)).any()


@pytest.mark.parametrize(
    ("shape", "head", "requests"),
    [("qwen3", "weaver", 1), ("llama3_rope", "weaver", 3), ("qwen3", "markov", 3), ("llama3_rope", "recurrent", 3)],
)
def test_every_method_emits_ars_tokens_and_greedy_ones_equal_transformers_generate(shape, head, requests, tmp_path):
    reference = saved(shape, tmp_path)
    target = checkpoints.load_target(tmp_path, tap_layers=(0, 2))
    models = Models(target, random_drafter(), random_weaver(), random_head(head) if head != "weaver" else None)
    prompts = [Prompt(f"p{i}", i, draw_tokens(4 + 7 * i, seed=i).tolist()) for i in range(3)]
    expected = {}
    for prompt in prompts:
        ids = torch.tensor([prompt.tokens])
        generated = reference.generate(ids, do_sample=False, max_new_tokens=14, attention_mask=torch.ones_like(ids))
        expected[prompt.id] = generated[0, len(prompt.tokens) :].tolist()
    for temperature in (0.0, 1.0):
        outputs = {}
        for method, knobs in SETTINGS.items():
            knobs = knobs | ({"head": head} if "head" in METHODS[method].options else {})
            abreast = 1 if method == "adaptive" else requests  # each step of it has a budget of its own
            config = DecodeConfig(method=method, temperature=temperature, max_new_tokens=14, requests=abreast, **knobs)
            done = []
            decode(prompts, models, config, proposer=resolve(method)(config, models), on_finish=done.append)
            outputs[method] = {trace.id: trace.output_tokens for trace in done}
        assert set(SETTINGS) == set(METHODS)
        assert all(outputs[method] == outputs["ar"] for method in METHODS)
        assert outputs["ar"] == expected or temperature > 0


def random_drafter() -> Drafter:
    drafter = Drafter(DrafterConfig(WIDTH, 64, 2, 1, 16, ("full_attention",), (0, 2), 5, block_size=8))
    init_drafter(drafter, 0)
    return drafter.requires_grad_(False)


def random_weaver() -> Weaver:
    config = WeaverConfig(d_model=WIDTH, d_embed=WIDTH, d_rank=16, num_heads=2, mlp_dim=16, K=7, candidate_pool_size=16)
    weaver = Weaver(config)
    init_weaver(weaver, 0, std=0.3)
    return weaver.requires_grad_(False)


def random_head(kind: str):
    sizes = {"state": 8} if kind == "recurrent" else {}
    head = build_head(HeadConfig(kind, d_model=WIDTH, d_embed=WIDTH, rank=8, **sizes))
    init_head(head, 0, std=0.3)
    with torch.no_grad():
        head.up.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return head.requires_grad_(False)


@pytest.mark.parametrize("shape", ["qwen3", "qwen3_tied", "llama3_rope"])
def test_a_sharded_checkpoint_loads_and_a_saved_one_is_what_transformers_reads(shape, tmp_path):
    reference = saved(shape, tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    target = checkpoints.load_target(tmp_path / "theirs")
    checkpoints.save_target(target, tmp_path / "ours")
    again = checkpoints.load_target(tmp_path / "ours")
    assert again.config == target.config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(theirs) is type(reference)
    tokens = draw_tokens(1, 30)
    with torch.inference_mode():
        assert (target(tokens).logits - reference(tokens).logits).abs().max() < 1e-4
        assert (again(tokens).logits - theirs(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda state: state.pop("model.layers.1.self_attn.q_norm.weight"),
            r"layers\.1\.self_attn\.q_norm\.weight: missing, expected shape \(20,\)",
            id="missing",
        ),
        pytest.param(
            lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(80)}),
            r"layers\.0\.self_attn\.q_proj\.bias: not part of the model \(shape \(80,\) in model\.safetensors\)",
            id="extra",
        ),
        pytest.param(
            # twice the rows: a gated q_proj in a model that has no gate
            lambda state: state.update({"model.layers.2.self_attn.q_proj.weight": torch.zeros(160, WIDTH)}),
            r"layers\.2\.self_attn\.q_proj\.weight: shape \(160, 48\) in model\.safetensors, expected \(80, 48\)",
            id="misshapen",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_shapes(change, message, tmp_path):
    model = reference_model("qwen3")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(state)
    checkpoints.write_tensors(tmp_path, state, model.config.to_dict())
    with pytest.raises(ValueError, match=message):
        checkpoints.load_target(tmp_path)


def test_rotary_tables_of_an_old_llama_file_are_skipped(tmp_path):
    model = reference_model("llama")
    state = dict(model.state_dict()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}
    checkpoints.write_tensors(tmp_path, state, model.config.to_dict())
    assert isinstance(checkpoints.load_target(tmp_path), Target)


def raw_config(shape: str, **changes) -> dict:
    family, special = SHAPES[shape]
    return {**getattr(transformers, f"{family}Config")(**{**SIZES, **special}).to_dict(), **changes}


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ("qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}, "'Qwen3MoeForCausalLM' is not supported .*Qwen3ForC"),
        ("qwen3", {"model_type": "mistral"}, "'mistral' is not supported .*Qwen3_5ForCausalLM, .*LlamaForCausalLM"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, "name llama and qwen3"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window True is not supported .allowed: False"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types .'linear_attention'. is not supported"),
        ("qwen3", {"attention_bias": True}, "attention_bias True is not supported"),
        ("qwen3", {"attn_output_gate": True}, "attn_output_gate True is not supported .allowed: False"),
        ("qwen3", {"num_hidden_layers": 5}, "num_hidden_layers 5, but layer_types names 3"),
        ("qwen3", {"head_dim": None}, "missing head_dim"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads 3 is not allowed .allowed: a divisor"),
        ("qwen3", {"vocab_size": "128"}, "vocab_size '128' is not allowed .allowed: an integer"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* is not supported"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("llama", {"sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported .allowed: 'silu'"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rotary keys full_attention"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_parameters .* and rope_scaling .* differ"),
        ("llama3_rope", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3 lacks low_freq_factor"),
        ("llama3_rope", {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor 1.0 .*below"),
        ("llama3_rope", {"rope_parameters": {**LLAMA3, "factor": 0}}, "factor 0 is not allowed .allowed: a number > 0"),
    ],
)  # fmt: skip
def test_a_config_that_asks_for_something_else_is_refused_by_name(shape, changes, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_dict(raw_config(shape, **changes))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_config_survives_a_round_trip_and_json(shape):
    config = TargetConfig.from_dict(raw_config(shape))
    assert TargetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_config_of_an_old_llama_file_is_read_as_transformers_reads_it(tmp_path):
    """rope_theta and rope_scaling at the top level, no head_dim, no rope_parameters."""
    raw = raw_config("llama3_rope")
    rope = raw.pop("rope_parameters")
    del raw["head_dim"]
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert TargetConfig.from_dict(raw) == TargetConfig.from_dict(raw_config("llama3_rope"))


def test_a_dense_target_has_no_recurrent_state():
    target = Target(TargetConfig.from_dict(raw_config("qwen3")))
    cache = prefilled(target, draw_tokens(1, 9))
    assert all(hasattr(layer, "keys") for layer in cache.layers)
    assert not any("linear_attn" in name for name, _ in target.named_parameters())
