"""`tfm` as a person and as a pipe meet it: colour in a terminal, none elsewhere, one line for bad words."""

import os
import pty
import re
import subprocess
import sys

import pytest
from workflow_runs import ROOT

from baselines import cli

TFM = [sys.executable, "-m", "baselines.cli"]
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
GENERATE = ["generate", "How many primes are below 30?", "--max-new-tokens", "8", "--show-tree"]
CELLS = ["cells", "--where", "dataset==sample-math and temperature==0"]


def environment(**changes):
    kept = {
        key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **changes}


def in_a_terminal(words, width=80, **changes):
    """What a terminal of this width is sent by a command, and its exit status."""
    master, slave = pty.openpty()
    changes = {"TERM": "xterm-256color", "COLUMNS": str(width), **changes}
    with subprocess.Popen(
        [*TFM, *words], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment(**changes)
    ) as process:
        os.close(slave)
        data = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # Linux says EIO once the other end is closed
                break
            if not piece:
                break
            data += piece
    os.close(master)
    return data.decode().replace("\r\n", "\n"), process.returncode


def in_a_pipe(words, **changes):
    return subprocess.run([*TFM, *words], cwd=ROOT, env=environment(**changes), capture_output=True, text=True)


@pytest.mark.parametrize(("words", "width"), [(GENERATE, 80), (CELLS, 80), (CELLS, 120)])
def test_a_terminal_gets_colour_and_whole_lines(words, width):
    text, status = in_a_terminal(words, width)
    assert status == 0 and "\x1b[" in text
    bare = CODE.sub("", text).replace("\r", "\n")
    assert max(map(len, bare.split("\n"))) <= width
    assert any(sign in bare for sign in "●·✓")


def test_a_pipe_gets_no_code_and_lines_that_do_not_depend_on_the_width():
    done = [in_a_pipe(CELLS, COLUMNS=width, TERM="xterm-256color") for width in ("80", "200")]
    assert "\x1b" not in done[0].stdout + done[0].stderr
    assert done[0].stdout == done[1].stdout and done[0].stdout.count("\t") == 3 * done[0].stdout.count("\n") > 0


def test_no_color_means_no_code_at_all():
    text, status = in_a_terminal(CELLS, NO_COLOR="1")
    assert status == 0 and not re.search(r"\x1b\[[0-9;]*m", text) and "sample-math/tfm" in text


def test_a_terminal_without_unicode_gets_ascii():
    text, status = in_a_terminal(CELLS, PYTHONIOENCODING="ascii")
    assert status == 0 and text.isascii()
    done = in_a_pipe(GENERATE, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and '* "' in done.stdout


def test_help_imports_no_command():
    code = (
        "import sys\nfrom baselines import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'rich', 'yaml', 'numpy', 'baselines.suite'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
    assert all(f"\n    {name} " in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_says_what_it_does(command, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert error.value.code == 0 and out.startswith(f"usage: tfm {command}") and len(out.splitlines()) > 4


def test_a_command_that_is_none_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["gnerate"])
    err = capsys.readouterr().err
    assert error.value.code == 2 and err.count("\n") == 1 and "choose from" in err and "doctor" in err


def test_a_reader_that_has_enough_stops_the_command_quietly():
    call = " ".join([*TFM, "cells | head -n 1"])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", call], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_file_in_a_folders_place_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "Snakefile").touch()
    (tmp_path / ".snakemake").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tfm resume: ") and ".snakemake: " in err and err.count("\n") == 1


def test_an_interrupt_ends_in_one_line(monkeypatch, capsys):
    from baselines.commands import pin

    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(pin, "run", interrupted)
    assert cli.main(["pin"]) == 130 and capsys.readouterr().err == "\ntfm pin: interrupted\n"
