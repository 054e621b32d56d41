"""One server of an engine: started on the loopback, waited for, and ended with everything that it started."""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from baselines.serving import keeper
from baselines.serving.wire import HOST, ServerError, call
from tfm.manifest import write_json

EVERY = 0.2  # seconds between two looks at a server that starts
TAIL = 15  # lines of a server's log that a failure shows


@dataclass(frozen=True)
class Launch:
    """How a server is started. Two cells whose launches are equal can share one."""

    command: tuple[str, ...]  # without the port
    port_flag: str = "--port"
    health: str = "/health"  # answers 200 once requests are served
    environment: tuple[tuple[str, str], ...] = ()
    cleared: tuple[str, ...] = field(default=())  # variables that the server must not inherit


class Server:
    """A running server; a context manager. `port` is where it listens on the loopback.

    Entering raises BlockingIOError when another run has a server in this folder, and ServerError when the port is taken
    or the server ends before it serves.
    """

    def __init__(self, launch: Launch, *, folder: Path, port: int | None = None, start_seconds: float = 900):
        """`folder` holds server.log, and server.json while the server runs, by which a later run finds an orphan."""
        self.launch, self.folder, self.start_seconds = launch, Path(folder).resolve(), start_seconds
        self.log, self.state = self.folder / "server.log", self.folder / "server.json"
        self.token = secrets.token_hex(8)
        self._wanted_port, self._keeper, self._lifeline, self._lock = port, None, None, None

    def __enter__(self) -> "Server":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "server.lock", "a", encoding="utf-8")  # noqa: SIM115, held until stop
        try:
            # another run's server is no orphan
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end_orphan(self.state)
            self.port = claim_port(self._wanted_port)
            self._start()
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def is_alive(self) -> bool:
        """Return whether the server's first process runs."""
        return self._keeper is not None and self._keeper.poll() is None

    def stop(self) -> None:
        """End the server and all its processes; when this returns none of them holds memory of a card."""
        if self._keeper is not None:
            os.close(self._lifeline)
            self._keeper.wait(timeout=4 * keeper.GRACE + 10)
            keeper.end(self.token, grace=keeper.GRACE)
            self._keeper = None
            self.state.unlink(missing_ok=True)
        self._lock.close()

    def explain(self, error: Exception) -> ServerError:
        """Return what is reported of a failed request: the error, whether the server lives, the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(timeout=1)  # a server that just died is seen by its keeper a moment later
        state = "the server still runs" if self.is_alive() else f"the server ended with status {self._status()}"
        return ServerError(f"{error}; {state}; the end of {self.log.name}:\n{self.tail()}")

    def tail(self) -> str:
        """Return the last lines of the server's log."""
        return (
            "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
            if self.log.exists()
            else ""
        )

    def _start(self) -> None:
        launch = self.launch
        reading, self._lifeline = os.pipe()
        inherited = {key: value for key, value in os.environ.items() if key not in launch.cleared}
        command = [sys.executable, keeper.__file__, str(reading), str(keeper.GRACE), "--"]
        command += [*launch.command, "--host", HOST, launch.port_flag, str(self.port)]
        # found by a later run whatever happens to this one, so written first
        write_json(self.state, {"token": self.token, "port": self.port, "command": list(launch.command)})
        with open(self.log, "ab") as log:
            self._keeper = subprocess.Popen(
                command,
                env={**inherited, **dict(launch.environment), keeper.MARK: self.token},
                # not the checkout, whose folder kernels would pass for the package of that name
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[reading],
                start_new_session=True,
            )
        os.close(reading)

    def _wait(self) -> None:
        until = time.monotonic() + self.start_seconds
        while time.monotonic() < until:
            if not self.is_alive():
                raise ServerError(f"the server ended with status {self._status()} before it served:\n{self.tail()}")
            if _answers(self.port, self.launch.health):
                return
            time.sleep(EVERY)
        raise ServerError(
            f"server_seconds: {self.start_seconds} is not enough for this server (allowed: any number of seconds); "
            f"raise it, a first start compiles kernels; its log ends:\n{self.tail()}"
        )

    def _status(self) -> int | None:
        try:
            return self._keeper.wait(timeout=keeper.GRACE)
        except subprocess.TimeoutExpired:
            return None


def claim_port(wanted: int | None) -> int:
    """Return a port of the loopback that is free now: the wanted one, or any. Raises ServerError when it is taken."""
    with socket.socket() as probe:
        # as servers bind: a port that only waits for its last packets is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except OSError as error:
            raise ServerError(
                f"server_port: {wanted} is not allowed (allowed: a free port of {HOST}; {error.strerror}); end what "
                "listens there, or leave server_port out"
            ) from error
        return probe.getsockname()[1]


def end_orphan(state: Path) -> list[int]:
    """End what an earlier run's server left alive and return its process ids; none where there is no state file."""
    try:
        token = json.loads(state.read_text(encoding="utf-8"))["token"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        state.unlink()  # cut short by a full disk; the keeper ends that server
        return []
    ended = keeper.end(str(token), grace=keeper.GRACE)
    state.unlink(missing_ok=True)
    return ended


def _answers(port: int, path: str) -> bool:
    try:
        return call(port, "GET", path, timeout=5)[0] == 200
    except ServerError:
        return False
