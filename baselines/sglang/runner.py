"""SGLang's server for a cell: how it is launched, how a request is sent and read, what it says of itself."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from baselines.serving.reply import Reply, Watcher, check_pace
from baselines.serving.server import Launch
from baselines.serving.site import checkpoint_folder, make_site, probe, read_config, text_sizes, with_fields
from baselines.serving.wire import ServerError, get_json, stream
from baselines.sglang.flags import VERSION, arguments
from tfm.config import DecodeConfig
from tfm.decode import Prompt

PLUGIN = "dflash_tfm"  # the entry point of group sglang.srt.plugins
SETTINGS = "DFLASH_TFM"  # environment variable of the plugin's settings, JSON
# what a run must not inherit: they change acceptance, or which plugins load
CLEARED = ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_ACC_TOKEN_MODE", SETTINGS)


def launch(cell: dict, *, place, environment: dict[str, str]) -> Launch:
    """Return the launch of a cell's server; raises ValueError when the environment lacks this SGLang."""
    paths = {"PYTHONPATH": make_site(place.folder), "SGLANG_PLUGINS": PLUGIN}
    probe(place.python, "sglang", VERSION, paths)
    server, weights = cell["server"], cell["weights"]
    folders = {part: checkpoint_folder(Path(folder), place.folder) for part, folder in weights.items()}
    folders |= completed(folders, place.folder)
    command = [place.python, "-m", "sglang.launch_server", "--model-path", str(folders["target"])]
    if "drafter" in folders:
        command += ["--speculative-draft-model-path", str(folders["drafter"])]
    if server["plugin"] is not None:
        weaver = str(folders["weaver"]) if "weaver" in folders else None
        paths[SETTINGS] = json.dumps({**server["plugin"], "weaver": weaver}, sort_keys=True)
    variables = {**environment, **paths, "HF_HUB_OFFLINE": "1"}
    return Launch(
        command=(*command, *arguments(server["flags"])),
        environment=tuple(sorted(variables.items())),
        cleared=CLEARED,
    )


def completed(folders: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Return the folders whose config.json lacks what SGLang does not derive itself, with copies in their places.

    Raises ValueError for a pattern of layers that SGLang has no word for.
    """
    target, found = text_sizes(folders["target"]), {}
    kinds = target.get("layer_types")
    if kinds and "full_attention_interval" not in target and "linear_attention" in kinds:
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
        if kinds != ["linear_attention" if place % every else "full_attention" for place in range(1, len(kinds) + 1)]:
            raise ValueError(
                f"layer_types: {kinds} is not allowed with engine sglang (allowed: full_attention at every n-th "
                "layer); choose another engine"
            )
        found["target"] = with_fields(folders["target"], {"full_attention_interval": every}, folder)
    if "drafter" in folders:
        drafter = read_config(folders["drafter"])
        if "num_target_layers" not in {**drafter, **drafter.get("dflash_config", {})}:
            layers = {"num_target_layers": target["num_hidden_layers"]}
            found["drafter"] = with_fields(folders["drafter"], layers, folder)
    return found


def generate(
    port: int,
    prompt: Prompt,
    watcher: Watcher,
    *,
    timeout: float,
    on_tokens: Callable[[int], None] | None = None,
) -> Reply:
    """Send one request and read its stream until the server or the watcher ends it."""
    reply = Reply(sent=time.perf_counter())
    chunks = stream(port, "/generate", _body(prompt, watcher.config), timeout=timeout)
    try:
        for chunk in chunks:
            # the whole output so far
            tokens, meta, known = chunk["output_ids"], chunk["meta_info"], len(reply.tokens)
            if tokens[:known] != reply.tokens:
                raise ServerError(
                    f"POST /generate: a chunk of {len(tokens)} tokens does not begin with the {known} sent before; the "
                    "server streams what is new alone, or took tokens back"
                )
            fresh = tokens[known:]
            if not fresh and not meta.get("finish_reason"):
                check_pace(reply, timeout)
                continue
            reply.take(fresh, time.perf_counter())
            _read_meta(reply, meta)
            over = watcher.take(fresh)
            if on_tokens is not None:
                on_tokens(len(tokens))
            # a stop string is this project's: closing the stream aborts the request
            if over and watcher.config.stop and reply.finish is None:
                reply.closed = True
                break
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"POST /generate: a chunk without {error}; is this SGLang {VERSION}?") from error
    finally:
        chunks.close()
    return reply


def facts(port: int, cell: dict) -> dict:
    """Return the engine's version and the arguments it runs with, as it says itself; paths and tokens left out.

    Raises ServerError when it runs another version or algorithm than the cell's.
    """
    info = get_json(port, "/server_info")
    found, wanted = info.get("version"), cell["server"]["version"]
    if found != wanted:
        raise ServerError(
            f"the server is SGLang {found}, the cell was resolved for {wanted}; pip install sglang=={wanted}"
        )
    algorithm, asked = info.get("speculative_algorithm"), cell["server"]["flags"].get("speculative-algorithm")
    if (algorithm or None) != asked:
        raise ServerError(
            f"the server runs speculative_algorithm {algorithm!r}, the cell asks for {asked!r}; see its log"
        )
    plain = {key: value for key, value in info.items() if isinstance(value, str | int | float | bool | None)}
    effective = {
        key: value for key, value in sorted(plain.items()) if not key.endswith(("path", "key", "host", "port"))
    }
    return {"name": "sglang", "version": found, "effective": effective, "counters": "per request, with a histogram"}


def memory(port: int) -> dict:
    """Return what the server says of its memory (GiB by use)."""
    states = get_json(port, "/server_info").get("internal_states")
    first = states[0] if isinstance(states, list) and states else None
    return {"memory_gib": first.get("memory_usage") if isinstance(first, dict) else None}


def _body(prompt: Prompt, config: DecodeConfig) -> dict:
    sampling = {"temperature": 0.0 if config.is_greedy else config.temperature, "max_new_tokens": config.max_new_tokens}
    sampling |= {"top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
    # every arm ends at the same tokens; ignore_eos would switch these off too
    sampling |= {"stop_token_ids": list(config.eos_tokens), "ignore_eos": False}
    # read by the plugin: a token's noise is a function of seed, prompt and position
    sampling["custom_params"] = {"tfm_seed": config.seed, "tfm_index": prompt.index}
    return {"input_ids": prompt.tokens, "sampling_params": sampling, "stream": True}


def _read_meta(reply: Reply, meta: dict) -> None:
    reason = meta.get("finish_reason")
    reply.finish = reason["type"] if isinstance(reason, dict) else reason
    reply.prompt_tokens, reply.completion_tokens = meta["prompt_tokens"], meta["completion_tokens"]
    reply.cached_tokens = meta["cached_tokens"]
    reply.verify_steps = meta.get("spec_verify_ct")
    histogram = meta.get("spec_correct_drafts_histogram")
    reply.histogram = None if histogram is None else list(histogram)
