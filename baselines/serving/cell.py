"""Run one cell inside a serving engine: its prompts over HTTP, its counters into this project's records."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from baselines.engine_names import runner_of
from baselines.methods import METHODS
from baselines.serving import card
from baselines.serving.reply import Arm, Watcher, order_is_known, to_trace
from baselines.serving.server import Server
from baselines.serving.site import text_sizes
from baselines.serving.wire import ServerError
from tfm import manifest
from tfm.cells import CellWriter, rerun_command
from tfm.config import DecodeConfig
from tfm.decode import Prompt
from tfm.span import Span

WARM_UP_PROMPTS, WARM_UP_TOKENS = 2, 32  # the first request of a server compiles kernels, the second is as the others
REQUEST_SECONDS = 600.0  # without a token, after which a request has failed
logger = logging.getLogger("serve_cell")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where servers of a run live: what a machine decides and no record depends on."""

    folder: Path  # of server.log and server.json, and of checkpoints written for the engine
    python: str  # of the environment that holds the engine
    port: int | None = None
    start_seconds: float = 900.0


class Session:
    """The one server of a run, started again only when a cell needs another one; a context manager."""

    def __init__(self, place: Place):
        self.place, self.server, self._launch = place, None, None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server, when there is one."""
        if self.server is not None:
            self.server.stop()
        self.server = self._launch = None

    def server_for(self, cell: dict, environment: dict[str, str]) -> Server:
        """Return a running server that decodes as the cell says."""
        runner, place = runner_of(cell["engine"]), self.place
        launch = runner.launch(cell, place=place, environment=environment)
        if self.server is None or launch != self._launch or not self.server.is_alive():
            self.stop()
            server = Server(launch, folder=place.folder, port=place.port, start_seconds=place.start_seconds)
            self.server, self._launch = server.__enter__(), launch
        return self.server


def run_cell(
    cell: dict,
    rows: list,
    config: DecodeConfig,
    *,
    session: Session,
    writer: CellWriter,
    detokenise: Callable[[list[int]], str],
    progress=None,
) -> dict:
    """Send the prompts of `rows` that the writer lacks, add their records to it, and return the facts of the run.

    Raises ServerError when the server does not start, breaks off or refuses, and ValueError when its answer lacks a
    counter or contradicts itself; finished requests are safe in the writer.
    """
    runner = runner_of(cell["engine"])
    with card.claim(cell["device"]) as (environment, device_facts):
        writer.on_device(device_facts["name"], [row.id for row in rows])
        pending = [Prompt(row.id, row.index, row.tokens) for row in rows if row.id not in writer.done]
        server = session.server_for(cell, environment)
        try:
            engine = runner.facts(server.port, cell)
            _warm_up(runner, server, pending, config)
            for prompt in pending:
                watcher = Watcher(config, detokenise)
                trace = _request(runner, server, prompt, watcher, arm_of(cell), progress)
                writer.add(trace if cell["clock"] != "off" else _untimed(trace))
                if progress is not None:
                    progress.finished()
                steps = len(trace.steps)
                logger.info(
                    "%s: %d tokens, %d steps, %s", trace.id, len(trace.output_tokens), steps, trace.finish_reason
                )
            engine |= runner.memory(server.port)
        except ServerError as error:
            raise server.explain(error) from error
    unordered = sum(not order_is_known(trace) for trace in writer.done.values())
    warm_up = {"prompts": WARM_UP_PROMPTS, "new_tokens": min(WARM_UP_TOKENS, config.max_new_tokens)}
    engine |= {"requests_with_unordered_steps": unordered}
    facts = {"engine": engine, "device": device_facts, "cpu_share": None, "warm_up": warm_up}
    return facts | {"resumed_requests": len(rows) - len(pending)}


def arm_of(cell: dict) -> Arm:
    """Return what a cell's method verifies in a step."""
    method, decode, rows = cell["decode"]["method"], cell["decode"], cell["server"]["draft_rows"]
    if method == "ar":
        return Arm(speculative=False, nodes=1, depth=0)
    if "budget" not in METHODS[method].knobs:
        depth = decode["depth"] or rows
        return Arm(speculative=True, nodes=depth + 1, depth=depth, room=_room(cell))
    return Arm(speculative=True, nodes=decode["budget"] + 1, depth=None)


def _room(cell: dict) -> int | None:
    """Return the tokens within which vLLM drafts: its context, or the drafter's when that is shorter."""
    context = cell["server"]["flags"].get("max-model-len")
    if context is None:
        return None
    own = text_sizes(Path(cell["weights"]["drafter"])).get("max_position_embeddings")
    return min(context, own) if isinstance(own, int) else context


def facts_of(cell: dict, config: DecodeConfig, out: Path, *, span: Span, commit: str | None) -> dict:
    """Return what cell.json says beside the run's facts: resolved cell, code and times."""
    environment = manifest.environment()
    if commit is not None:
        environment["git"] = {"commit": commit, "dirty": None}
    resolved = {**cell, "decode": dataclasses.asdict(config)}
    loader = {"schema": manifest.SCHEMA_VERSION, "loader_digest": manifest.loader_digest()}
    return {**loader, "cell": resolved, "environment": environment, "rerun": rerun_command(out), **span.facts()}


def _warm_up(runner: ModuleType, server: Server, pending: list[Prompt], config: DecodeConfig) -> None:
    # no measured prompt: the first one's tokens in reverse
    settings = dataclasses.replace(config, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens), stop=())
    for _ in range(WARM_UP_PROMPTS if pending else 0):
        prompt = Prompt("warm-up", 0, pending[0].tokens[::-1])
        runner.generate(server.port, prompt, Watcher(settings, str), timeout=REQUEST_SECONDS)


def _request(runner: ModuleType, server: Server, prompt: Prompt, watcher: Watcher, arm: Arm, progress):
    on_tokens = None if progress is None else lambda emitted: progress.token(prompt.id, emitted)
    reply = runner.generate(server.port, prompt, watcher, timeout=REQUEST_SECONDS, on_tokens=on_tokens)
    return to_trace(prompt, reply, watcher, arm)


def _untimed(trace):
    return dataclasses.replace(trace, prefill_us=None, decode_us=None)
