"""Ask a serving engine the shortest question: does each method start, and is its greedy text the target's own?"""

import argparse
import concurrent.futures
import copy
import json
import sys
import time
from pathlib import Path

import torch
from input_errors import told
from run_cells import prompts_file, register_kernels

DESCRIPTION = """
Reads a suite's plan and its prepared prompts (below --root), starts one server for each of --methods, all at once on
one card, and sends every server the same prompts at temperature 0. Every text is compared with this project's own
target in float32 on the CPU, so give weights of a small family. A first difference counts as a near tie when the two
tokens' scores are closer than what bfloat16 moves there. Times mean nothing here. Writes one JSON file; last line of
stdout: one JSON object. Exit 1 when a server failed or a text differs elsewhere than at a near tie.
"""


def greedy(target, tokens: list[int], count: int, end: tuple[int, ...]) -> list[int]:
    """Return the target's own continuation, `count` tokens or up to an end of text."""
    from baselines.methods import resolve
    from tfm.config import DecodeConfig
    from tfm.decode import Models, Prompt, decode

    config, done = DecodeConfig(method="ar", temperature=0.0, max_new_tokens=count, eos_tokens=end), []
    models = Models(target, None, None)
    decode([Prompt("check", 0, tokens)], models, config, proposer=resolve("ar")(config, models), on_finish=done.append)
    return done[0].output_tokens


def judge(targets: dict[str, torch.nn.Module], prompt: list[int], wanted: list[int], got: list[int]) -> dict:
    """Return {same, at, gap, moved} of two continuations; at is the first difference, None where there is none.

    `gap` is the float32 score of the wanted token over the other's, `moved` what bfloat16 moves their difference by.
    """
    at = next((i for i, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return {"verdict": "equal" if len(wanted) == len(got) else "other length", "tokens": len(got)}
    tokens, pair = torch.tensor([[*prompt, *wanted[:at]]]), [wanted[at], got[at]]
    with torch.inference_mode():
        scores = {name: target(tokens).logits[0, -1].double()[pair] for name, target in targets.items()}
    gaps = {name: float(found[0] - found[1]) for name, found in scores.items()}
    moved = float((scores["bfloat16"] - scores["float32"]).abs().max())
    # each of the two scores moves
    is_near = abs(gaps["float32"]) <= 2 * moved
    facts = {"at": at, "wanted": pair[0], "got": pair[1], "gap": gaps["float32"], "moved": moved}
    return {"verdict": "near tie" if is_near else "different", "tokens": at, **facts}


def ask(cell: dict, prompts: list, options: argparse.Namespace, environment: dict[str, str]) -> list[dict]:
    """Start a cell's server and return its reply to every prompt."""
    from baselines.engine_names import runner_of
    from baselines.serving.cell import Place
    from baselines.serving.reply import Watcher
    from baselines.serving.server import Server
    from baselines.serving.wire import ServerError
    from tfm.config import DecodeConfig
    from tfm.decode import Prompt

    method, runner = cell["decode"]["method"], runner_of(cell["engine"])
    place = Place(options.server_folder / method, options.server_python, None, options.server_seconds)
    launch, start = runner.launch(cell, place=place, environment=environment), time.time()
    with Server(launch, folder=place.folder, start_seconds=options.server_seconds) as server:
        ready, replies = time.time() - start, []
        try:
            runner.facts(server.port, cell)
            for row in prompts:
                end = end_of(cell["weights"]["target"])
                config = DecodeConfig(method=method, temperature=0.0, max_new_tokens=options.new_tokens, eos_tokens=end)
                watcher = Watcher(config, str)
                reply = runner.generate(
                    server.port, Prompt(row.id, row.index, row.tokens), watcher, timeout=options.server_seconds
                )
                replies.append({"id": row.id, "tokens": watcher.emitted, "steps": reply.verify_steps})
                print(
                    f"{method}: {row.id}: {len(watcher.emitted)} tokens, {time.time() - start:.0f} s", file=sys.stderr
                )
        except ServerError as error:
            raise server.explain(error) from error
    return [{**reply, "ready_s": round(ready, 1)} for reply in replies]


def end_of(target: str) -> tuple[int, ...]:
    """Return the tokens that end a text, as the target's config.json says."""
    from baselines.serving.site import text_sizes

    found = text_sizes(Path(target)).get("eos_token_id")
    return tuple(found) if isinstance(found, list) else (found,) if found is not None else ()


def chosen_cells(options: argparse.Namespace) -> list[dict]:
    """Return one greedy cell a method, with the flags that let servers share a card; ValueError when one is missing."""
    from baselines.plans import read_cells

    cells = [
        cell for cell in read_cells(options.list) if cell["dataset"] == options.dataset and cell["setting"] == "t0"
    ]
    found = []
    for method in options.methods:
        cell = next((cell for cell in cells if cell["decode"]["method"] == method and "server" in cell), None)
        if cell is None:
            there = sorted({cell["decode"]["method"] for cell in cells})
            raise ValueError(
                f"methods: {method!r} has no served cell of {options.dataset} at t0 (allowed: {', '.join(there)})"
            )
        cell = copy.deepcopy(cell)
        share = {"mem-fraction-static": round(0.8 / len(options.methods), 2), "max-total-tokens": 16384}
        cell["server"]["flags"] |= share
        found.append(cell)
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--list", type=Path, required=True, help="plan.json of a suite whose engine serves")
    add("--root", type=Path, required=True, help="folder of results/")
    add("--dataset", default="sample-math", help="prompt set")
    add("--methods", nargs="+", default=["tfm", "ar"], help="one server each")
    add("--count", type=int, default=4, help="prompts")
    add("--new-tokens", type=int, default=48)
    add("--server-python", default=sys.executable, help="Python of the engine's environment (default: this one)")
    add("--server-seconds", type=float, default=400, help="longest wait for a server, and for a reply")
    add("--server-folder", type=Path, required=True, help="folder for logs and state of the servers")
    add("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict:
    from baselines.serving import card
    from tfm import manifest
    from tfm.checkpoints import load_target
    from tfm.prompts import read_prepared

    cells = chosen_cells(options)
    prompts = read_prepared(prompts_file(cells[0], options.root))[: options.count]
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    targets = {name: load_target(cells[0]["weights"]["target"], dtype=dtype).eval() for name, dtype in types.items()}
    end, arms, failed = end_of(cells[0]["weights"]["target"]), {}, {}
    with card.claim(cells[0]["device"]) as (environment, device), concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {cell["decode"]["method"]: pool.submit(ask, cell, prompts, options, environment) for cell in cells}
        wanted = {row.id: greedy(targets["float32"], row.tokens, options.new_tokens, end) for row in prompts}
        for method, job in jobs.items():
            try:
                replies = job.result()
            except Exception as error:  # the other servers' answers are worth the machine's time; the exit code tells
                failed[method] = f"{type(error).__name__}: {error}"
                print(f"{method}: {failed[method][-3000:]}", file=sys.stderr, flush=True)
                continue
            rows = zip(prompts, replies, strict=True)
            arms[method] = [{**r, **judge(targets, row.tokens, wanted[row.id], r["tokens"])} for row, r in rows]
    manifest.write_json(options.out, {"device": device, "wanted": wanted, "arms": arms, "failed": failed})
    verdicts = {method: [row["verdict"] for row in rows] for method, rows in arms.items()}
    return {"verdicts": verdicts, "failed": sorted(failed)}


@told
def main() -> int:
    options = parse()
    register_kernels()
    result = run(options)
    print(json.dumps(result))
    is_good = all(verdict in ("equal", "near tie") for found in result["verdicts"].values() for verdict in found)
    return 0 if is_good and not result["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
