"""Train a whole family in bounded, resumable calls: every call does what fits and says what remains.

    python -m tfm.train.run --config workflows/config/train_nano.yaml --data DIR --out OUT --device cuda --minutes 9

The last line of stdout is a JSON object: {"done": [stages], "remaining": [stages], "reports": [...]}. Call again with
the same --out until nothing remains. On a host with several GPUs: torchrun --nproc-per-node N -m tfm.train.run ...
"""

import argparse
import json
import sys
import time

from tfm.train import corpus, drafter, export, sample, target, weaver
from tfm.train.layout import Layout, add_arguments, prepare_device, with_steps, without_graphs
from tfm.train.loop import Deadline
from tfm.train.peers import ALONE, Peers
from tfm.train.settings import STAGES, TrainSettings, load_settings

RUNS = {
    "tokenizer": corpus.run,
    "target": target.run,
    "sample": sample.run,
    "drafter": drafter.run,
    "weaver": weaver.run,
    "export": lambda settings, layout, *, device, deadline, peers: export.run(settings, layout, peers=peers),
}


def run_stages(
    settings: TrainSettings,
    layout: Layout,
    stages: list[str],
    *,
    device: str,
    deadline: Deadline,
    peers: Peers = ALONE,
) -> dict:
    """Run the stages in order until one cannot finish before the deadline; finished ones only report."""
    reports = []
    for stage in stages:
        if peers.any(deadline.is_over, device):
            break
        began = time.monotonic()
        report = RUNS[stage](settings, layout, device=device, deadline=deadline, peers=peers)
        reports.append(report | {"call_seconds": round(time.monotonic() - began, 1)})
        if peers.is_first:
            print(json.dumps(reports[-1]), file=sys.stderr, flush=True)
        if not report["done"]:
            break
    done = [report["stage"] for report in reports if report["done"]]
    return {"done": done, "remaining": [stage for stage in stages if stage not in done], "reports": reports}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated, in order; default: all")
    for stage in ("target", "drafter", "weaver"):
        parser.add_argument(f"--{stage}-steps", type=int, default=None, help="in place of the config's")
    parser.add_argument("--conversations", type=int, default=None, help="answers to sample, in place of the config's")
    options = parser.parse_args()
    stages = options.stages.split(",")
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise SystemExit(f"stages: {', '.join(unknown)} is not allowed (allowed: {', '.join(STAGES)})")
    settings = load_settings(options.config, conversations=options.conversations)
    for stage in ("target", "drafter", "weaver"):
        settings = with_steps(settings, stage, getattr(options, f"{stage}_steps"))
    if options.no_graphs:
        settings = without_graphs(settings)
    peers = prepare_device(options.device)
    layout, deadline = Layout(options.out, options.data), Deadline(options.minutes)
    report = run_stages(settings, layout, stages, device=options.device, deadline=deadline, peers=peers)
    if peers.is_first:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
