"""Keep one server: start it, and end it with all its children when whoever asked for it is gone, however it went.

Run as a process of its own, `python keeper.py LIFELINE GRACE -- COMMAND...`: LIFELINE is a file descriptor, the
reading end of a pipe whose writing end the runner holds. The kernel closes that end when the runner dies, by SIGKILL
too, and then nothing that the server started may live on and hold the card. Standard library only.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "TFM_SERVER"  # environment variable that every process of one server inherits
GRACE = 10.0  # seconds between asking a server to end and ending it
EVERY = 0.1


def marked(token: str) -> list[int]:
    """Return the ids of this user's live processes that carry a server's mark, this one left out."""
    wanted, found = f"{MARK}={token}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        # other users' processes cannot be read, and some end while this looks
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return [process for process in found if is_alive(process)]


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def end(token: str, *, grace: float = GRACE) -> list[int]:
    """End all processes of a server: asked first, after `grace` seconds killed. Return those that were there."""
    there = seen = marked(token)
    for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        for process in seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        until = time.monotonic() + wait
        while (seen := marked(token)) and time.monotonic() < until:
            time.sleep(EVERY)
        if not seen:
            return there
    raise TimeoutError(f"processes {seen} of a server did not end after SIGKILL; the driver may hold them, see dmesg")


def keep(lifeline: int, command: list[str], *, grace: float) -> int:
    """Run a command until it ends or the other end of the lifeline closes; return its exit status."""
    token = os.environ[MARK]
    # signals for the runner's terminal are the runner's business: it closes the lifeline when it goes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while server.poll() is None:
        if select.select([lifeline], [], [], EVERY)[0]:
            break
    end(token, grace=grace)
    return server.wait()


if __name__ == "__main__":
    status = keep(int(sys.argv[1]), sys.argv[sys.argv.index("--") + 1 :], grace=float(sys.argv[2]))
    sys.exit(status if status >= 0 else 128 - status)
