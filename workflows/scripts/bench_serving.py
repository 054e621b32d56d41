"""Time a step of each method inside SGLang at a shape whose weights nobody needs: random ones, forced acceptance."""

import argparse
import dataclasses
import json
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from input_errors import told
from run_cells import REPOSITORY, register_kernels

DESCRIPTION = """
Reads the shape of a graft suite's config and writes folders with a config.json each (and a random weaver); SGLang draws
the other weights. Launches one server an arm, in the order given, and times requests from their stream: (last - first
chunk) / verify steps, or / tokens for ar. Random models agree on no token, so every step accepts --accept drafts: that
changes the work of neither draft nor verify. Writes one JSON file; its rows are single requests. Last line of stdout:
one JSON object. Exit 1 when an arm failed; the others are there.
"""
VOCABULARY = range(1000, 8000)  # ids of the random prompts
POOL = re.compile(r"(\w+) size: ([\d.]+)GB")  # of SGLang's log; its GB are 2**30 bytes
OWN = re.compile(r"DFLASH_TFM: .*?; ([\d.]+) GiB")


def write_shapes(config: dict, folder: Path) -> dict[str, str]:
    """Write config.json of target and drafter and a random weaver, at the config's shape; return part -> folder."""
    from tfm.checkpoints import save_weaver
    from tfm.weaver import Weaver, WeaverConfig, init_weaver

    weights, shape = Path(config["weights"]), config["graft"]
    parts = {}
    for part in ("target", "drafter", "weaver"):
        fields = json.loads((weights / part / "config.json").read_text(encoding="utf-8"))
        fields |= {key: value for key, value in shape[part].items() if key not in ("layers", "target_layer_ids")}
        parts[part] = fields
    target, drafter, weaver = parts["target"], parts["drafter"], parts["weaver"]
    interval = target.pop("full_attention_interval")
    kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
    target["layer_types"] = kinds * (target["num_hidden_layers"] // interval)
    target |= {"tie_word_embeddings": False, "full_attention_interval": interval, "mamba_ssm_dtype": "float32"}
    # an end that a random model does not reach
    target |= {"max_position_embeddings": 32768, "eos_token_id": target["vocab_size"] - 1}
    drafter |= {"hidden_size": target["hidden_size"], "vocab_size": target["vocab_size"], "num_hidden_layers": 5}
    drafter |= {"num_target_layers": target["num_hidden_layers"], "max_position_embeddings": 32768}
    drafter["dflash_config"] |= {"target_layer_ids": shape["drafter"]["target_layer_ids"]}
    weaver |= {"d_model": target["hidden_size"], "d_embed": target["hidden_size"]}
    for part in ("target", "drafter"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(parts[part], indent=1), encoding="utf-8")
    model = Weaver(WeaverConfig.from_dict(weaver))
    init_weaver(model, 0)
    save_weaver(model, folder / "weaver")
    return {part: str(folder / part) for part in parts}


def cell_of(arm: str, options: argparse.Namespace, weights: dict[str, str]) -> dict:
    """Return what the runner needs of a cell for an arm: METHOD or METHOD-recurrent."""
    from baselines.methods import METHODS
    from baselines.sglang.flags import server_of
    from tfm.config import DecodeConfig

    method, _, ending = arm.partition("-")
    backend = "recurrent_triton" if ending == "recurrent" else options.kernel
    tree = {"budget": options.budget, "candidates": options.candidates} if "budget" in METHODS[method].knobs else {}
    width = {"width": 12} if method == "dartree" else {}
    decode = dataclasses.asdict(DecodeConfig(method=method, gdn_backend=backend, temperature=0.0, **tree, **width))
    cell = {"engine": "sglang", "decode": decode, "dtype": "bfloat16", "seed": 0, "device": "cuda"}
    flags = {"load-format": "dummy", "attention-backend": options.attention}
    flags |= {"speculative-draft-load-format": "dummy"} if method != "ar" else {}
    flags |= dict(word.partition("=")[::2] for word in options.flag)
    rows = None if method == "ar" else 15
    cell["server"] = server_of(cell, draft_rows=rows, context=options.context, paper=False, flags=flags)
    if cell["server"]["plugin"] is not None:
        cell["server"]["plugin"] |= {"simulate_accept": options.accept, **_settings(options.plugin)}
    cell["weights"] = {part: weights[part] for part in ("target", *METHODS[method].parts)}
    return cell


def _settings(words: list[str]) -> dict:
    """Return name=value words as settings; a value is JSON where it reads as that, else text."""
    found = {}
    for word in words:
        name, is_pair, value = word.partition("=")
        if not is_pair:
            raise ValueError(f"--plugin: {word!r} is not allowed (allowed: NAME=VALUE); write for example ahead=none")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def time_arm(arm: str, options: argparse.Namespace, weights: dict[str, str], environment: dict[str, str]) -> dict:
    """Return the rows of an arm's requests, and what its server says of itself."""
    from baselines.serving import card
    from baselines.serving.cell import Place
    from baselines.serving.reply import Watcher
    from baselines.serving.server import Server
    from baselines.sglang import runner
    from tfm.config import DecodeConfig

    cell, draw = cell_of(arm, options, weights), random.Random(1)
    place = Place(options.server_folder / arm, options.server_python, None, options.server_seconds)
    earlier = _text(place.folder / "server.log")
    launch = runner.launch(cell, place=place, environment=environment)
    if arm == "dflash":  # counts the bonus token too
        forced = {"SGLANG_SIMULATE_ACC_LEN": str(options.accept + 1)}
        forced["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
        pairs = tuple(sorted({**dict(launch.environment), **forced}.items()))
        launch = dataclasses.replace(launch, environment=pairs)
    rows = []
    with Server(launch, folder=place.folder, start_seconds=options.server_seconds) as server:
        facts = runner.facts(server.port, cell)
        for length in options.prompts:
            for repeat in range(-options.warm_up, options.repeats):
                tokens = [draw.choice(VOCABULARY) for _ in range(length)]
                config = DecodeConfig(
                    method=cell["decode"]["method"], max_new_tokens=options.new_tokens, temperature=0.0
                )
                reply = _send(server, tokens, config, Watcher(config, str))
                if repeat >= 0:
                    rows.append({"prompt_tokens": length, **_timed(reply, is_ar=arm == "ar")})
        used = card.memory_used_mib(environment["CUDA_VISIBLE_DEVICES"]) if environment else None
        memory = runner.memory(server.port)
    # the log goes on where an earlier server of this folder ended, which may have had another kernel
    states = state_gib(_text(server.log).removeprefix(earlier))
    return {"engine": facts | memory, "memory_used_mib": used, "state_gib": states, "rows": rows, "cell": cell}


def state_gib(log: str) -> dict[str, float]:
    """Return GiB of recurrent state that a server said it allocated: SGLang's pool by kind, and the plugin's own."""
    found = {}
    for line in log.splitlines():
        if "Mamba Cache is allocated" in line:
            found |= {name: float(size) for name, size in POOL.findall(line)}
        elif match := OWN.search(line):
            found["plugin"] = float(match[1])
    return found


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _send(server, tokens: list[int], config, watcher):
    from baselines.serving.wire import ServerError
    from baselines.sglang import runner
    from tfm.decode import Prompt

    try:
        return runner.generate(server.port, Prompt("bench", 0, tokens), watcher, timeout=600)
    except ServerError as error:
        raise server.explain(error) from error


def _timed(reply, *, is_ar: bool) -> dict:
    (first, head), (last, tail) = reply.chunks[0], reply.chunks[-1]
    steps = tail - head if is_ar else reply.verify_steps
    if not steps:
        raise ValueError(f"a reply of {tail} tokens counts {steps} steps; without spec_verify_ct no step can be timed")
    if len(reply.chunks) < 2:
        raise ValueError(f"a reply of {tail} tokens came in one chunk, whose steps took no time that the stream shows")
    row = {"new_tokens": tail, "steps": steps, "prefill_ms": 1e3 * (first - reply.sent)}
    row |= {"histogram": reply.histogram, "decode_ms": 1e3 * (last - first)}
    return row | {"step_ms": 1e3 * (last - first) / steps}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=REPOSITORY / "workflows/config/graft.yaml", help="config with the shape")
    add("--arms", nargs="+", default=["ar", "dflash", "ddtree", "tfm"], help="methods, also METHOD-recurrent")
    add("--kernel", default="fused_cuda", choices=("fused_cuda", "fused_triton"), help="of the arms without an ending")
    add("--attention", default="triton", help="SGLang's attention backend, the same for all arms")
    add("--budget", type=int, default=64, help="drafted nodes")
    add("--candidates", type=int, default=512, help="K of the weaver")
    add("--accept", type=int, default=3, help="drafts that every step accepts")
    add("--prompts", type=int, nargs="+", default=[512], help="prompt lengths")
    add("--new-tokens", type=int, default=256)
    add("--repeats", type=int, default=3, help="timed requests a prompt length")
    add("--warm-up", type=int, default=1, help="requests before them")
    add("--context", type=int, default=4096)
    add("--flag", nargs="*", default=[], help="more launch flags of every arm, as name=value")
    add("--plugin", nargs="*", default=[], help="settings of the plugin of every tree, as name=value: ahead=none")
    add("--layers", type=int, help="fewer layers of the target, a multiple of 4: a smoke test, no time")
    add("--server-python", default=sys.executable, help="Python of SGLang's environment (default: this one)")
    add("--server-seconds", type=float, default=400)
    add("--server-folder", type=Path, required=True, help="folder for logs and state of the servers")
    add("--commit", help="commit of the code where this is no git checkout")
    add("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict:
    from baselines.serving import card
    from tfm import manifest

    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    config["weights"] = str(REPOSITORY / config["weights"])
    if options.layers:
        whole = config["graft"]["target"]["num_hidden_layers"]
        taps = config["graft"]["drafter"]["target_layer_ids"]
        config["graft"]["drafter"]["target_layer_ids"] = [place * options.layers // whole for place in taps]
        config["graft"]["target"]["num_hidden_layers"] = options.layers
    arms, failed = {}, {}
    state = {"commit": options.commit, "dirty": None} if options.commit else manifest.git_state()
    with tempfile.TemporaryDirectory() as scratch, card.claim("cuda") as (environment, device):
        weights = write_shapes(config, Path(scratch))
        for arm in options.arms:
            try:
                arms[arm] = time_arm(arm, options, weights, environment)
            except Exception as error:  # the other arms are worth the machine's time; the exit code tells
                failed[arm] = f"{type(error).__name__}: {error}"
                print(f"{arm}: {failed[arm][-3000:]}", file=sys.stderr, flush=True)
            else:
                values = [row["step_ms"] for row in arms[arm]["rows"]]
                text = f"{arm}: {statistics.median(values):.3f} ms a step, {len(values)} requests"
                print(text, file=sys.stderr, flush=True)
            # after a failed arm too: its reason is a result
            record = {"device": device, "shape": config["graft"], "options": _plain(options), "arms": arms}
            record |= {"failed": failed, "torch": torch.__version__, "git": state}
            manifest.write_json(options.out, record)
    medians = {arm: round(statistics.median(r["step_ms"] for r in found["rows"]), 4) for arm, found in arms.items()}
    return {"step_ms": medians, "failed": sorted(failed)}


def _plain(options: argparse.Namespace) -> dict:
    machine = ("server_python", "server_folder", "out", "config", "commit")
    return {key: value for key, value in vars(options).items() if key not in machine}


@told
def main() -> int:
    options = parse()
    register_kernels()
    result = run(options)
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
