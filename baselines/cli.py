"""The console command `tfm`: one module a command, imported when it is called."""

import argparse
import importlib
import os
import sys
import textwrap

# one line of help each, here so that --help imports no command
COMMANDS = {
    "generate": "answer a prompt with any method; watch its draft trees",
    "doctor": "what this machine has, and which suites it can run",
    "cells": "the cells of a suite: done, stale, missing, and why",
    "resume": "go on after a kill",
    "plan": "hours, energy and disk of a suite on some cards, estimated",
    "pin": "fill the revisions of hub prompt sets (needs the network)",
}
EPILOG = "tfm COMMAND --help says what a command reads and writes."


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help says more\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 2 for bad input, said in one line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, module = parse(words)
    try:
        status = module.run(options)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"tfm {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ntfm {options.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of the pipe has enough; what is buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a read-only folder, a full disk, a file in a folder's place
        what = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"tfm {options.command}: {what}", file=sys.stderr)
        return 2


def parse(words: list[str]) -> tuple[argparse.Namespace, object]:
    """Return the options and the module of the command that they name; exits on --help and on bad words."""
    parser = Parser(prog="tfm", description="Tools around the harness; run them in the repository.", epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    modules = {}
    for name, text in COMMANDS.items():
        modules[name] = importlib.import_module(f"baselines.commands.{name}") if name == chosen else None
        command = commands.add_parser(
            name,
            help=text,
            description=modules[name] and textwrap.fill(modules[name].DESCRIPTION, 79),
            epilog=getattr(modules[name], "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if modules[name]:
            modules[name].add_arguments(command)
    options, rest = parser.parse_known_args(words)
    if options.command is None:
        parser.print_help()
        sys.exit(0 if not words else 2)
    module = modules[options.command]
    if rest and not getattr(module, "TAKES_REST", False):
        hint = getattr(module, "REST_HINT", "")
        commands.choices[options.command].error(f"unrecognised: {' '.join(rest)}{hint}")
    options.rest = rest
    return options, module


if __name__ == "__main__":
    sys.exit(main())
