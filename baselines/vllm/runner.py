"""vLLM's server for a cell: how it is launched, how a request is sent and read, what it counts.

vLLM counts drafts for the whole server, not by request. One request runs at a time here, so a request's own counts are
the totals after it less those before; the records say so.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from baselines.serving.reply import Reply, Watcher, check_pace
from baselines.serving.server import Launch
from baselines.serving.site import checkpoint_folder, probe, with_vocabulary
from baselines.serving.wire import ServerError, call, get_json, stream
from baselines.sglang.flags import arguments
from baselines.vllm.flags import VERSION
from tfm.config import DecodeConfig
from tfm.decode import Prompt

PREFIX = "vllm:spec_decode_num_"
TOTALS = ("drafts", "accepted_tokens")
COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?\{([^}]*)\}\s+(\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
SETTLE_SECONDS, EVERY = 5.0, 0.02  # the totals are written a moment after the last token is sent


def launch(cell: dict, *, place, environment: dict[str, str]) -> Launch:
    """Return the launch of a cell's server; raises ValueError when the environment lacks this vLLM."""
    probe(place.python, "vllm", VERSION, {})
    server = cell["server"]
    folders = {part: checkpoint_folder(Path(folder), place.folder) for part, folder in cell["weights"].items()}
    command = [place.python, "-m", "vllm.entrypoints.cli.main", "serve", str(folders["target"])]
    if server["drafts"] is not None:
        model = with_vocabulary(folders["drafter"], folders["target"], place.folder)
        drafter = {"method": "dflash", "model": str(model), "num_speculative_tokens": server["drafts"]}
        command += ["--speculative-config", json.dumps(drafter)]
    variables = {**environment, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    return Launch(command=(*command, *arguments(server["flags"])), environment=tuple(sorted(variables.items())))


def generate(
    port: int,
    prompt: Prompt,
    watcher: Watcher,
    *,
    timeout: float,
    on_tokens: Callable[[int], None] | None = None,
) -> Reply:
    """Send one request, read its stream until the server or the watcher ends it, and take its counts."""
    before = totals(port)
    reply = Reply(sent=time.perf_counter())
    chunks = stream(port, "/v1/completions", _body(prompt, watcher.config), timeout=timeout)
    try:
        for chunk in chunks:
            usage = chunk.get("usage")
            if usage is not None:
                reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if not chunk["choices"]:
                continue
            choice = chunk["choices"][0]
            fresh = list(choice["token_ids"] or [])
            reply.take(fresh, time.perf_counter())
            check_pace(reply, timeout)
            reply.finish = choice["finish_reason"] or reply.finish
            over = watcher.take(fresh)
            if on_tokens is not None:
                on_tokens(len(reply.tokens))
            # a stop string is this project's: closing the stream aborts the request
            if over and watcher.config.stop and reply.finish is None:
                reply.closed = True
                break
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"POST /v1/completions: a chunk without {error}; is this vLLM {VERSION}?") from error
    finally:
        chunks.close()
    if before is not None:
        _count(reply, before, port)
    return reply


def facts(port: int, cell: dict) -> dict:
    """Return the engine's version and flags; raises ServerError when it runs another version, or drafts unasked."""
    found, wanted = get_json(port, "/version").get("version"), cell["server"]["version"]
    if found != wanted:
        raise ServerError(f"the server is vLLM {found}, the cell was resolved for {wanted}; pip install vllm=={wanted}")
    drafts, asked = totals(port) is not None, cell["server"]["drafts"] is not None
    if drafts != asked:
        said = "counts drafts" if drafts else "has no counter of drafts in /metrics"
        raise ServerError(f"the server {said}, the cell asks for {cell['server']['drafts']} drafts a step; see its log")
    counters = "totals of the server only: a request's are the differences around it, one request at a time"
    return {"name": "vllm", "version": found, "effective": cell["server"]["flags"], "counters": counters}


def memory(port: int) -> dict:
    """Return nothing: vLLM's server says nothing of its memory by use."""
    del port
    return {"memory_gib": None}


def totals(port: int) -> dict | None:
    """Return the server's totals {drafts, accepted_tokens, by_position: [...]}; None when it counts no drafts.

    Those of several engines of one server are added. Raises ServerError when some of them are there and others not, and
    for a value that is no count.
    """
    status, data = call(port, "GET", "/metrics")
    if status != 200:
        raise ServerError(f"GET /metrics: status {status}; a counter that is missing is no zero")
    found, places = Counter(), Counter()
    for name, labels, value in COUNTER.findall(data.decode(errors="replace")):
        if name in TOTALS:
            found[name] += _whole(name, value)
        elif name == "accepted_tokens_per_pos":
            place = POSITION.search(labels)
            if place is None:
                raise ServerError(f"GET /metrics: {PREFIX}{name} without a position; is this vLLM {VERSION}?")
            places[int(place[1])] += _whole(name, value)
    if not found and not places:
        return None
    lacking = [f"{PREFIX}{name}" for name in TOTALS if name not in found]
    gaps = sorted(set(range(max(places, default=0) + 1)) - set(places))
    if gaps:
        lacking.append(f"{PREFIX}accepted_tokens_per_pos" + (f" of {', '.join(map(str, gaps))}" if places else ""))
    if lacking:
        raise ServerError(f"GET /metrics: no {', '.join(lacking)}; a counter that is missing is no zero")
    return {**found, "by_position": [places[place] for place in sorted(places)]}


def _whole(name: str, value: str) -> int:
    """Return a counter's value; raises ServerError for what is no whole number >= 0."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (number >= 0 and number.is_integer()):  # NaN is not >= 0, inf no integer
        raise ServerError(f"GET /metrics: {PREFIX}{name} is {value}; a count is a whole number >= 0")
    return int(number)


def _count(reply: Reply, before: dict, port: int) -> None:
    """Add a request's own counts: steps, and how many of them accepted how many drafts.

    A step too close to the context's end drafts nothing and is not counted by vLLM: it made one token, and the tokens
    that the counted steps did not make tell how many there were. Raises ServerError when the totals stay behind, fall,
    or contradict each other.
    """
    until, after_first = time.monotonic() + SETTLE_SECONDS, len(reply.tokens) - 1
    while True:
        after = totals(port)
        if after is None:
            raise ServerError("GET /metrics: the counters of drafts are gone; the server was started again")
        steps, accepted, exact = _since(before, after)
        agree = min(exact) >= 0 and sum(place * count for place, count in enumerate(exact)) == accepted
        if (agree and steps + accepted >= after_first) or time.monotonic() > until:
            break
        time.sleep(EVERY)
    if after_first and not steps:
        raise ServerError(f"GET /metrics: {after_first} tokens after the first and not one step counted; see its log")
    if not agree:
        raise ServerError(
            f"GET /metrics: {steps} steps that accepted {accepted} drafts, but by their number {exact}; the counters "
            "contradict each other"
        )
    reply.undrafted = max(0, after_first - steps - accepted)
    reply.histogram = [exact[0] + reply.undrafted, *exact[1:]]
    reply.verify_steps = steps + reply.undrafted


def _since(before: dict, after: dict) -> tuple[int, int, list[int]]:
    """Return steps, accepted drafts and [h] -> steps that accepted h drafts; raises ServerError when a total fell."""
    early, late = ([one["drafts"], one["accepted_tokens"], *one["by_position"]] for one in (before, after))
    if len(early) != len(late) or any(more < less for less, more in zip(early, late, strict=True)):
        raise ServerError(
            f"GET /metrics: the totals went from {early} to {late}; none ever falls, so the server was started again"
        )
    steps, accepted, *reached = (more - less for less, more in zip(early, late, strict=True))
    return steps, accepted, [more - less for more, less in zip([steps, *reached], [*reached, 0], strict=True)]


def _body(prompt: Prompt, config: DecodeConfig) -> dict:
    return {
        "model": "target",
        "prompt": prompt.tokens,
        "max_tokens": config.max_new_tokens,
        "temperature": 0.0 if config.is_greedy else config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "stop_token_ids": list(config.eos_tokens),
        "ignore_eos": False,
        "detokenize": False,
        "return_token_ids": True,
        # the request's own generator: seed of the cell, apart for every prompt, within the 63 bits of torch's seeds
        "seed": (config.seed + 1_000_003 * prompt.index) % 2**63,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
