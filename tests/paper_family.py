"""A small random family in the exact public formats of suite paper: Qwen3.6 target, z-lab drafter, Weaver .pth."""

import hashlib
import json
from pathlib import Path

import torch
from huggingface_hub import _local_folder as hub_client
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tfm.drafter import Drafter, DrafterConfig, init_drafter
from tfm.weaver import Weaver, WeaverConfig, init_weaver

TOKENIZER = Path(__file__).resolve().parent.parent / "tfm/weights/nano/target/tokenizer.json"
WIDTH, VOCAB, LAYERS = 32, 2064, 8  # the vocabulary is padded beyond the tokenizer's 2048, as Qwen's is
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 262144,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 16,
}
# the keys of z-lab's config.json, at small sizes
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 2050, "target_layer_ids": [0, 1, 3, 5, 6]},
    "dtype": "bfloat16",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": VOCAB,
}
WEAVER = WeaverConfig(d_model=WIDTH, d_embed=WIDTH, d_rank=16, num_heads=2, mlp_dim=16, candidate_pool_size=512)


def write_target(folder: Path) -> None:
    """Write shards with an index under the multimodal names, with vision and MTP tensors and Qwen's tokenizer files."""
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "visual" not in name:
            parameter.data.normal_(std=0.2)
    model.bfloat16().save_pretrained(folder, max_shard_size="120KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    last = sorted(set(index["weight_map"].values()))[-1]
    mtp = {"mtp.fc.weight": torch.zeros(WIDTH, 2 * WIDTH), "mtp.layers.0.input_layernorm.weight": torch.zeros(WIDTH)}
    save_file({**load_file(folder / last), **mtp}, folder / last, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(mtp, last)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "do_sample": True}))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with Qwen's tags, where <think> is an ordinary added token, and no mask token."""
    fields = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    for token in fields["added_tokens"]:
        token["special"] = "think" not in token["content"]
        token["content"] = token["content"].replace("<|mask|>", "<|vision_pad|>")
    vocabulary = fields["model"]["vocab"]
    vocabulary["<|vision_pad|>"] = vocabulary.pop("<|mask|>")
    (folder / "tokenizer.json").write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")


def write_drafter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    drafter = Drafter(DrafterConfig.from_dict(DRAFTER))
    init_drafter(drafter, 0)
    tensors = {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DRAFTER))


def write_weaver(path: Path, *, fused: bool) -> None:
    """Write the released file: float32, and q, k, v either apart or in one matrix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weaver = Weaver(WEAVER)
    init_weaver(weaver, 0, std=0.3)
    state = dict(weaver.state_dict())
    for layer in range(WEAVER.num_layers if fused else 0):
        parts = [state.pop(f"blocks.{layer}.{part}_proj.weight") for part in "qkv"]
        state[f"blocks.{layer}.qkv_proj.weight"] = torch.cat(parts)
    names = ("d_model", "d_embed", "d_rank", "num_layers", "num_heads", "mlp_dim", "K", "candidate_pool_size")
    config = {name: getattr(WEAVER, name) for name in names} | {"encoder_mode": 3, "score_head": 4}
    torch.save({"config": config, "state_dict": state}, path)


def record_downloads(root: Path, revision: str) -> None:
    """Leave the records that `hf download --local-dir` leaves: SHA-256 of large files, git blobs of small ones."""
    for path in sorted(path for path in root.rglob("*") if path.is_file() and ".cache" not in path.parts):
        content = path.read_bytes()
        large = path.suffix in (".safetensors", ".pth")
        digest = hashlib.sha256(content) if large else hashlib.sha1(b"blob %d\0" % len(content) + content)
        hub_client.write_download_metadata(root, path.relative_to(root).as_posix(), revision, digest.hexdigest())
