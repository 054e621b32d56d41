"""The tests on every Python and torch that this project says it takes, each in a fresh environment.

    pip install nox
    nox --list                                          # all sessions
    nox -s tests                                        # 3.11 to 3.13, oldest and newest torch: 20 minutes each
    nox -s "tests-3.12(torch='2.13.0')" -- -k metrics   # one of them, some tests
    nox -s gpu                                          # on a machine with a card: the tests marked gpu
    nox -s triton                                       # the Triton kernels' logic, without a card

A Python that is not installed is skipped and named so; CI=1 or --error-on-missing-interpreters makes that an error.
Where two cards are, the gpu session runs the tests for two as well; they skip themselves with one. Seen to work so far:
tests-3.11 with torch 2.13.0 (three files of tests) and lint. Without nox, torch 2.13.0: eight files of tests on Python
3.13.0 (401 tests, one of which found a fault) and five on Python 3.12.1 (189). The CPU build of torch
2.11.0 could not be fetched where that was tried.
"""

import nox

PYTHONS = ["3.11", "3.12", "3.13"]
TORCHES = ["2.11.0", "2.13.0"]  # the oldest that pyproject.toml allows, and the newest that was tested
# as in .ci/run
TRITON = ["triton", "triton_target", "engine_triton", "step", "launches", "lk_triton"]
CPU = "https://download.pytorch.org/whl/cpu"
nox.options.sessions = ["tests", "lint"]


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def tests(session: nox.Session, torch: str) -> None:
    """The README's test command with the CPU build of one torch."""
    session.install(f"torch=={torch}", "--index-url", CPU)
    session.install("-e", ".[test]")
    session.run("pytest", "-q", *session.posargs)


@nox.session(python=PYTHONS[0])
def lint(session: nox.Session) -> None:
    """Layout and rules of the code."""
    session.install("ruff", "snakefmt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("snakefmt", "--check", "Snakefile", "workflows")


@nox.session(python=PYTHONS)
def gpu(session: nox.Session) -> None:
    """The tests marked gpu, one process a file, with the CUDA build of torch."""
    session.install(f"torch=={TORCHES[-1]}")
    session.install("-e", ".[test,gpu]")
    session.run("pytest", "-q", "-m", "gpu", *session.posargs)


@nox.session(python=PYTHONS)
def triton(session: nox.Session) -> None:
    """The Triton kernels in the interpreter. Triton never enters the environment of the other tests."""
    session.install(f"torch=={TORCHES[-1]}", "numpy", "pytest", "hypothesis", "setuptools", "--extra-index-url", CPU)
    session.install("--no-deps", "triton==3.9.0")
    session.install("--no-deps", "--no-build-isolation", "-e", ".")
    files = [f"tests/test_{name}.py" for name in TRITON]
    session.run("pytest", "-q", *files, *session.posargs, env={"TRITON_INTERPRET": "1"})
