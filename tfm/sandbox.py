"""Runs Python text that a model wrote: no network, nothing of this machine to write to, limits on time and memory.

Namespaces of the kernel do it (unshare of util-linux): the text gets a file system of its own in memory, with the
interpreter's folders read-only, its own process table and an interface-less network, loses every capability, and is
killed with all its children when the time is up. Where no such namespace can be made, nothing is run.
"""

import functools
import os
import secrets
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass

SETUP = """
set -e
root=$1; shift
mount -t tmpfs -o size=32m,mode=755 tmpfs "$root"
while [ "$1" != -- ]; do
    if [ -L "$1" ]; then cp -P "$1" "$root$1"
    else mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; mount -o remount,bind,ro,nosuid,nodev "$root$1"; fi
    shift
done; shift
mkdir -p "$root/proc" "$root/dev" "$root/old" "$root/tmp"
touch "$root/dev/null"; mount --bind /dev/null "$root/dev/null"
mount -t proc proc "$root/proc"
cd "$root"
pivot_root . old
umount -l /old; rmdir /old; cd /tmp
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork")
NAMESPACES += ("--kill-child=KILL",)
FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
KEPT = 2000  # characters of the text's output


@dataclass(frozen=True)
class Run:
    """How a program ended: `passed` only when it ran to its last line."""

    passed: bool
    reason: str  # "passed", "wrong", "time", "memory" or "stopped before the end"
    output: str  # the end of what it printed


def run_python(program: str, *, seconds: float = 5.0, memory: int = 512 << 20, processes: int = 16) -> Run:
    """Run `program` and return how it ended.

    `seconds` of wall time (and of processor time), bytes of address space a process. The kernel does not hold root to a
    number of processes: call it as another user. Raises ValueError where the sandbox cannot be made: there is no second
    way.
    """
    problem = why_not()
    if problem:
        raise ValueError(
            f"sandbox: cannot be made here ({problem}); grade on a Linux machine that allows unshare --user, or leave "
            "code ungraded"
        )
    return _run(program, seconds=seconds, memory=memory, processes=processes)


@functools.cache
def why_not() -> str:
    """Return why no sandbox can be made on this machine; nothing when one can."""
    try:
        done = _run("pass", seconds=20, memory=512 << 20, processes=16)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return "" if done.passed else f"{done.reason}: {done.output.strip()[-200:]}"


def _run(program: str, *, seconds: float, memory: int, processes: int) -> Run:
    # printed by the last line alone, so that an early exit(0) is no success
    token = secrets.token_hex(16)
    text = f"{program}\n\nprint('\\n{token}')\n"
    folders = [folder for folder in dict.fromkeys((*FOLDERS, *_interpreter())) if os.path.lexists(folder)]
    limits = ["prlimit", f"--as={memory}", f"--nproc={processes}", "--fsize=16777216", "--nofile=64", "--core=0"]
    limits += [f"--cpu={max(1, round(seconds))}", "--"]
    program_of = [sys.executable, "-I", "-c", "import sys; exec(compile(sys.stdin.read(), 'program', 'exec'))"]
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    # an empty folder, over which the namespace mounts its file system: nothing is ever written to it here
    with tempfile.TemporaryDirectory(prefix="tfm-sandbox-") as root:
        call = [*NAMESPACES, "sh", "-c", SETUP, "sh", root, *folders, "--", *limits, *program_of]
        try:
            done = subprocess.run(
                call, input=text.encode(), env=environment, capture_output=True, timeout=seconds, cwd="/"
            )
        except subprocess.TimeoutExpired as error:
            return Run(False, "time", _tail(error.stdout))
    return _verdict(done, token)


def _verdict(done: subprocess.CompletedProcess, token: str) -> Run:
    output = done.stdout + done.stderr
    if done.returncode == 0 and done.stdout.rstrip().endswith(token.encode()):
        return Run(True, "passed", _tail(done.stdout.rstrip()[: -len(token)]))
    if done.returncode == 0:
        return Run(False, "stopped before the end", _tail(output))
    if b"MemoryError" in output:
        return Run(False, "memory", _tail(output))
    return Run(False, "time" if done.returncode in (137, 152, -9, -24) else "wrong", _tail(output))


def _interpreter() -> list[str]:
    """Return the folders that this interpreter starts from: its environment's, and that of the base it was made of."""
    paths = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    paths += [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]
    paths = [os.path.abspath(path) for path in paths]
    # outermost first, and what lies in another one is there with it
    outer = ("/usr/", "/bin/", "/lib/")
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not path.startswith(outer) and path not in ("/usr", "/") and not any(path.startswith(f"{k}/") for k in kept):
            kept.append(path)
    return kept


def _tail(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")[-KEPT:]
