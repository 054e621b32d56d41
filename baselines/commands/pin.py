"""`tfm pin`: fill the hub revisions of the prompt sets."""

import argparse
from pathlib import Path

from baselines.suite import PINS_FILE
from tfm import pins

DESCRIPTION = "Reads and rewrites the pins file: asks the hub for the newest commit of each set that has no revision."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `tfm pin` takes."""
    parser.add_argument("datasets", nargs="*", help="sets to pin; all unpinned ones when none is named")
    parser.add_argument("--update", action="store_true", help="also replace revisions that are filled already")
    parser.add_argument("--pins", type=Path, default=PINS_FILE, help="the pins file (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Fill revisions in the pins file and say which."""
    found = pins.pin(options.pins, names=options.datasets or None, update=options.update)
    for name, revision in found.items():
        print(f"{name}: {revision}")
    if not found:
        print("nothing to pin: every set has a revision (--update replaces them)")
    return 0
