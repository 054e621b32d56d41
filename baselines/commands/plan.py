"""`tfm plan`: hours, card hours, energy and disk of a suite before it runs."""

import argparse
import contextlib
import json
from dataclasses import asdict

import yaml

from baselines import planning, suite
from baselines.commands.cells import check_checkout, parse_value, suite_names
from baselines.estimate import EXPECTED
from baselines.inputs import WORKFLOWS
from baselines.refusals import one_of
from baselines.terminal import Screen
from tfm.manifest import REPOSITORY

DESCRIPTION = (
    "Works out how long a suite takes on some cards, what it draws and writes, and which chain of jobs no number of "
    "cards shortens. Reads configs only, no weights. All numbers are estimates: prompts x tokens / tokens "
    "a second + reading of weights, at the paper's speeds (SGLang on a B200) or at the speed of --ar-tok-s."
)
EXAMPLES = """examples:
  tfm plan --suite paper --gpus 8
  tfm plan --suite paper --gpus 8 --tokens 1500
  tfm plan --suite paper --gpus 1 --ar-tok-s 31   # after the first ar cell: its tok_s"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `tfm plan` takes."""
    add = parser.add_argument
    add("--suite", default="paper", metavar="NAME", help="a config of workflows/config (default: paper)")
    add("--config", nargs="+", default=[], metavar="KEY=VALUE", help="values in place of the config's")
    add("--gpus", type=int, default=1, help="cards, each of which runs one cell at a time (default: 1)")
    add(
        "--tokens", type=int, help="tokens of an answer, assumed (default: the suite's cap, which bounds it from above)"
    )
    add(
        "--ar-tok-s",
        type=float,
        metavar="N",
        help="measured tokens a second of ar; other methods by the paper's ratios",
    )
    add("--json", action="store_true", help="one JSON object instead of the report")


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    check_checkout()
    one_of("suite", options.suite, suite_names())
    given = dict(parse_value(word) for word in options.config)
    with contextlib.chdir(REPOSITORY):  # configs name weights from there
        raw = yaml.safe_load((WORKFLOWS / f"config/{options.suite}.yaml").read_text(encoding="utf-8"))
        config = suite.resolve({**raw, **given}, given=given)
        expected = yaml.safe_load(EXPECTED.read_text(encoding="utf-8"))
        result = planning.plan(config, expected, gpus=options.gpus, tokens=options.tokens, ar_tok_s=options.ar_tok_s)
    screen = Screen()
    if options.json:
        extra = {"chain_hours": result.chain_hours, "useful_gpus": result.useful_gpus}
        screen.console.file.write(json.dumps({**asdict(result), **extra}, indent=2) + "\n")
        return 0
    for line in report(result, speed=options.ar_tok_s):
        screen.line(line, wrap=True)
    return 0


def report(result: planning.Plan, *, speed: float | None) -> list[str]:
    """Return the lines of a plan."""
    chain = ", then ".join(f"{name} ({hours:.2f} h)" for name, hours in result.chain)
    disk = ", ".join(f"{name} {size:.1f}" for name, size in result.gigabytes.items())
    at = f"ar at {speed:g} tokens a second, the others by the paper's ratios" if speed else "the paper's speeds"
    return [
        f"suite {result.suite}: {result.cells} cells, {result.prompts} prompts a setting, {result.tokens} tokens an "
        "answer (assumed)",
        f"hours          {result.hours:.1f} on {result.gpus} GPUs, one cell each at a time",
        f"GPU-hours      {result.gpu_hours:.1f}",
        f"energy         {result.kilowatt_hours:.0f} kWh at most (GPU-hours x {planning.SERVER_KILOWATTS} kW / "
        f"{planning.SERVER_CARDS}, the most that a DGX B200 draws)",
        f"disk           {sum(result.gigabytes.values()):.1f} GB ({disk})",
        f"longest chain  {result.chain_hours:.1f} h: {chain}, then tables and report (minutes)",
        f"GPUs that help {result.useful_gpus}",
        f"Estimates, not times: prompts x tokens / tokens a second + reading of weights, at {at}.",
    ]
