"""Prepare one prompt set for one target: choose its rows, apply the template, tokenise, name what is skipped."""

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from input_errors import told

from tfm.pins import SOURCES, load_pins
from tfm.prompt_sources import PromptSet, load_prompt_set
from tfm.prompts import PROTOCOLS, SUBSAMPLE_SEED, Preparation, prepare, repeated, select, write_prepared
from tfm.tokenizer import TextTokenizer, load_tokenizer

DESCRIPTION = """
Reads the pins file, the prompt set from its source (embedded in tfm/data, a file of --data, or the hub at the pinned
revision) and tokenizer.json of --tokenizer. Writes --out, one JSON object a prompt (id, index, dataset, domain,
category, template, sha256 of the raw text, tokens), and beside it --manifest (what pins the set, the subset and the
templates, every skipped prompt with its reason, and prompts of one text). Last line of stdout: one JSON object. Exit 2
on bad input.
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="a name under the source in the pins file")
    parser.add_argument("--source", required=True, help=f"where rows come from: {', '.join(SOURCES)}")
    parser.add_argument("--data", type=Path, help="directory of the set's file (source local only)")
    parser.add_argument("--pins", type=Path, default=Path("workflows/config/datasets.yaml"))
    parser.add_argument("--tokenizer", required=True, type=Path, help="the target's directory, with tokenizer.json")
    parser.add_argument("--target", required=True, help="name of the target, recorded in the manifest")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--manifest", type=Path, help="default: --out with suffix .manifest.json")
    parser.add_argument("--context", required=True, type=int, help="tokens the target holds, prompt and answer")
    parser.add_argument("--max-new-tokens", required=True, type=int, help="the cap; a prompt must leave room for it")
    parser.add_argument("--limit", type=int, help="prompts to take instead of the protocol's number")
    parser.add_argument("--protocol", default="paper", help=f"prompt templates: {', '.join(PROTOCOLS)}")
    parser.add_argument("--reasoning", action="store_true", help="open the think block instead of an empty one")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict:
    """Write the prepared file and its manifest; return what is printed."""
    preparation = Preparation(
        max_new_tokens=options.max_new_tokens,
        context=options.context,
        protocol=options.protocol,
        reasoning=options.reasoning,
    ).check()
    prompt_set = load_prompt_set(
        load_pins(options.pins), source=options.source, name=options.dataset, data=options.data
    )
    tokenizer = load_tokenizer(options.tokenizer)
    count = prompt_set.count(options.limit)
    rows = select(prompt_set.rows, name=prompt_set.name, count=count, stratify=prompt_set.stratify)
    prompts, skipped = prepare(rows, tokenizer, preparation)
    for skip in skipped:
        print(f"{prompt_set.name}: skipped {skip.id} ({skip.reason})", file=sys.stderr)
    twice = repeated(prompts)
    for name, first in twice.items():
        print(f"{prompt_set.name}: {name} has the text of {first}, and both are used", file=sys.stderr)
    facts = _facts(options, prompt_set, tokenizer, preparation)
    facts |= {"selected": len(rows), "skipped": [asdict(skip) for skip in skipped], "repeated": twice}
    # by id, so that records split by language or subject where only the manifest is at hand
    facts["categories"] = {prompt.id: prompt.category for prompt in prompts if prompt.category}
    manifest_path = options.manifest or options.out.with_suffix(".manifest.json")
    manifest = write_prepared(options.out, manifest_path, prompts, facts)
    return {
        "prompts": str(options.out),
        "manifest": str(manifest_path),
        "n": len(prompts),
        "skipped": len(skipped),
        "prompts_sha256": manifest["prompts_sha256"],
    }


def _facts(
    options: argparse.Namespace, prompt_set: PromptSet, tokenizer: TextTokenizer, preparation: Preparation
) -> dict:
    return {
        "target": options.target,
        "dataset": prompt_set.name,
        "source": prompt_set.source,
        "dataset_sha256": prompt_set.sha256,
        "revision": prompt_set.revision,
        "rows": len(prompt_set.rows),
        "limit": options.limit,
        "cap": prompt_set.cap,
        "stratified": prompt_set.stratify,
        "subsample_seed": SUBSAMPLE_SEED,
        **asdict(preparation),
        "tokenizer_sha256": hashlib.sha256((options.tokenizer / "tokenizer.json").read_bytes()).hexdigest(),
        "vocab_sha256": tokenizer.vocab_sha256(),
    }


@told
def main() -> int:
    options = parse()
    result = run(options)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
