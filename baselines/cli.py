"""The console command `tfm`: one module a command, imported when it is called."""

import argparse
import importlib
import sys

# one line of help each, here so that --help imports no command
COMMANDS = {
    "resume": "go on after a kill",
    "pin": "fill the revisions of hub prompt sets (needs the network)",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 2 for bad input, said in one line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="tfm", description="Tools around the harness; run them in the repository.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    modules = {}
    for name, text in COMMANDS.items():
        modules[name] = importlib.import_module(f"baselines.commands.{name}") if name == chosen else None
        command = commands.add_parser(name, help=text, description=modules[name] and modules[name].DESCRIPTION)
        if modules[name]:
            modules[name].add_arguments(command)
    options, rest = parser.parse_known_args(words)
    module = modules[options.command]
    if rest and not getattr(module, "TAKES_REST", False):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        return module.run(options)
    except ValueError as error:
        print(f"tfm {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
