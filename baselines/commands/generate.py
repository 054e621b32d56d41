"""`tfm generate`: answer one prompt with a method and a family of weights. Everything is checked before torch loads."""

import argparse
import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from baselines.inputs import draft_rows
from baselines.methods import METHODS, check
from baselines.refusals import one_of
from tfm.config import DecodeConfig
from tfm.manifest import REPOSITORY, weight_files
from tfm.tokenizer import TextTokenizer, encode_prompt, end_tokens, load_tokenizer

DESCRIPTION = (
    "Reads the weights of a family and streams the answer to one prompt. In a terminal, accepted drafts are green and "
    "the target's own tokens plain. In a pipe, standard output holds the text alone and the last line, the summary, "
    "goes to standard error; with --show-tree, --stats or --compare, standard output holds what they show too."
)
EXAMPLES = """examples:
  tfm generate "How many primes are below 30?"
  tfm generate "How many primes are below 30?" --show-tree --max-new-tokens 24
  tfm generate "How many primes are below 30?" --method tfm --compare ar
  cat question.txt | tfm generate - --method ddtree --temperature 0 --stats"""
REST_HINT = "; a prompt of several words needs quotes"
FAMILIES = REPOSITORY / "tfm/weights"
BUDGET = 64  # the paper's
LARGE_VOCABULARY = 32_000  # from here on K is the paper's 512, below it 64


@dataclass(frozen=True)
class Job:
    """A checked request: what to run, on which weights, from which tokens."""

    config: DecodeConfig
    weights: dict[str, Path]  # part -> checkpoint folder
    family: str
    prompt: str
    tokens: tuple[int, ...]
    device: str
    threads: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `tfm generate` takes."""
    add = parser.add_argument
    add("prompt", help="the user's turn, or - to read it from standard input")
    add("--method", default="tfm", metavar="NAME", help=f"{', '.join(METHODS)} (default: %(default)s)")
    add("--family", default="nano", metavar="NAME", help="weights that ship in tfm/weights (default: %(default)s)")
    add("--weights", type=Path, metavar="DIR", help="a folder with target, drafter and weaver, instead of --family")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: %(default)g)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="the cap (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the noise; one seed, one answer (default: %(default)s)")
    add("--reasoning", action="store_true", help="open the think block instead of an empty one")
    tree = parser.add_argument_group("the draft tree (what the method takes)")
    tree.add_argument("--budget", type=int, metavar="N", help=f"drafted nodes, the root is extra (default: {BUDGET})")
    tree.add_argument("--width", type=int, metavar="N", help="nodes scored at once (default: the method's)")
    tree.add_argument("--depth", type=int, metavar="N", help="deepest draft (default: all the drafter's rows)")
    tree.add_argument("--children", type=int, metavar="N", help="children kept a node (default: 8)")
    tree.add_argument("--candidates", type=int, metavar="K", help="tokens a depth to choose from (default: 64 or 512)")
    show = parser.add_argument_group("what is shown")
    show.add_argument("--show-tree", action="store_true", help="draw every step's tree and the path that was accepted")
    show.add_argument("--tree-rows", type=int, default=24, metavar="N", help="lines a tree may take (default: 24)")
    show.add_argument("--stats", action="store_true", help="accepted drafts a step, and where the time went")
    show.add_argument(
        "--compare", metavar="NAME", help="run a second method too; exit 1 unless its tokens are the same"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: %(default)s)")
    machine.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Check everything, then load and decode."""
    prompt = read_prompt(options.prompt)
    job = check_job(options, options.method, prompt)
    other = None
    if options.compare:
        kept = METHODS[options.compare].knobs if options.compare in METHODS else ()
        unused = dict.fromkeys(set(METHODS["tfm"].knobs) - set(kept))
        other = check_job(argparse.Namespace(**{**vars(options), **unused}), options.compare, prompt)
    from baselines import generation  # needs torch, whose import takes seconds

    return generation.run(job, other, options)


def read_prompt(word: str) -> str:
    """Return the prompt; raises ValueError when it is empty or no UTF-8 text."""
    try:
        # the bytes of the word, whatever encoding the locale has
        given = sys.stdin.buffer.read() if word == "-" else os.fsencode(word)
        prompt = given.decode().rstrip("\n") if word == "-" else given.decode()
    except UnicodeError as error:
        raise ValueError(f"prompt: not UTF-8 text ({error}); convert it first, for example with iconv") from error
    if not prompt.strip():
        where = "standard input is empty" if word == "-" else f"{word!r} is empty"
        raise ValueError(f"prompt: {where} (allowed: some text); pass it in quotes, or - to read standard input")
    return prompt


def check_job(options: argparse.Namespace, method: str, prompt: str) -> Job:
    """Return the checked job of one method.

    Raises ValueError with key, value, allowed values and remedy; reads config and tokenizer files, loads no model.
    """
    one_of("method", method, METHODS)
    one_of("device", options.device, ("cpu", "cuda"))
    for key, most in (("threads", 1024), ("tree_rows", 2**31)):
        if not 1 <= getattr(options, key) <= most:
            name = key.replace("_", "-")
            raise ValueError(f"{name}: {getattr(options, key)} is not allowed (allowed: 1 to {most}); change {name}")
    folder, family = family_folder(options)
    sizes = target_sizes(folder)
    tokenizer = load_tokenizer(folder / "target")
    config = decode_config(options, method, sizes, tokenizer)
    # as in a cell: the model's own ends too
    config = dataclasses.replace(config, eos_tokens=end_tokens(folder / "target", tokenizer))
    check(config, draft_rows({"weights": str(folder)}))
    check_limits(config, sizes, family)
    weights = {part: folder / part for part in ("target", *METHODS[method].parts_for(config))}
    for part, where in weights.items():
        if not weight_files(where):
            raise ValueError(f"weights: {where} holds no file, {method} needs the {part}; put the checkpoint there")
    tokens = encode_prompt(tokenizer, prompt, reasoning=options.reasoning)
    context = sizes["max_position_embeddings"]
    if len(tokens) + config.max_new_tokens > context:
        raise ValueError(
            f"prompt: {len(tokens)} tokens + {config.max_new_tokens} new ones are not allowed (allowed: {context}, the "
            f"context of {family}); shorten the prompt or lower --max-new-tokens"
        )
    return Job(config, weights, family, prompt, tuple(tokens), options.device, options.threads)


def family_folder(options: argparse.Namespace) -> tuple[Path, str]:
    """Return the folder with a family's parts, and what to call it."""
    if options.weights is not None:
        if not (options.weights / "target/config.json").is_file():
            raise ValueError(f"weights: {options.weights} has no target/config.json; give a folder with target/ in it")
        return options.weights, options.weights.name
    one_of("family", options.family, sorted(path.parent.parent.name for path in FAMILIES.glob("*/target/config.json")))
    return FAMILIES / options.family, options.family


def target_sizes(folder: Path) -> dict:
    """Return the fields of the target's config.json, those of its text part where it has one."""
    path = folder / "target/config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        sizes = fields.get("text_config") or fields
        return {key: int(sizes[key]) for key in ("vocab_size", "max_position_embeddings")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weights: {path} is no target's config ({error!r}); restore the checkpoint") from error


def decode_config(options, method: str, sizes: dict, tokenizer: TextTokenizer) -> DecodeConfig:
    """Return the settings: what the options say, and defaults for what the method takes and they leave open."""
    knobs = {key: getattr(options, key) for key in METHODS["tfm"].knobs if getattr(options, key) is not None}
    defaults = {"budget": BUDGET, "candidates": 512 if sizes["vocab_size"] >= LARGE_VOCABULARY else 64}
    knobs = {key: value for key, value in defaults.items() if key in METHODS[method].knobs} | knobs
    return DecodeConfig(
        method,
        temperature=options.temperature + 0.0,  # no minus before a zero
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        eos_tokens=(tokenizer.eos_id,),
        **knobs,
    )


def check_limits(config: DecodeConfig, sizes: dict, family: str) -> None:
    """Raise ValueError where a number exceeds the vocabulary or the candidates."""
    knobs = METHODS[config.method].knobs
    limits = {"candidates": (sizes["vocab_size"], f"the vocabulary of {family}")}
    limits["children"] = (config.candidates, "the candidates")
    for key, (limit, why) in limits.items():
        value = getattr(config, key)
        if key in knobs and value > limit:
            raise ValueError(f"{key}: {value} is not allowed (allowed: 1 to {limit}, {why}); lower --{key}")


def title(job: Job) -> str:
    """Return one line that names the run: family, method with its numbers, temperature, seed."""
    knobs = [f"{key} {getattr(job.config, key)}" for key in METHODS[job.config.method].knobs]
    defaults = {f"{field.name} {field.default}" for field in dataclasses.fields(job.config)}
    named = [job.family, " ".join([job.config.method, *(knob for knob in knobs if knob not in defaults)])]
    return " · ".join([*named, f"T = {job.config.temperature:g}", f"seed {job.config.seed}"])
