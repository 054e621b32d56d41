"""A suite's config expanded into cells. The Snakefile and the `tfm` command both start here.

Names are spelled in baselines/names.py, a config is checked in baselines/validation.py; what callers need of them and
of baselines/inputs.py is offered here too.
"""

import math
import re
from dataclasses import asdict, replace

from baselines.engine_names import check_engine, is_served, served_settings
from baselines.inputs import PINS_FILE, draft_rows, missing_weights, pins, weight_digests
from baselines.methods import METHODS, SWEEPS, check
from baselines.names import (
    AGAIN,
    SETTING,
    STAGED,
    Variant,
    cell_path,
    parse_setting,
    parse_variant,
    setting_name,
    variant_pattern,
)
from baselines.refusals import one_of
from baselines.validation import FIGURE_TABLES, SCHEMA_FILE, check_file, resolve
from tfm.config import GREEDY_BELOW, DecodeConfig

__all__ = [
    "AGAIN",
    "FIGURE_TABLES",
    "PINS_FILE",
    "SCHEMA_FILE",
    "SETTING",
    "STAGED",
    "SWEEPS",
    "check_file",
    "draft_rows",
    "expand",
    "headline",
    "missing_weights",
    "parse_setting",
    "parse_variant",
    "pins",
    "resolve",
    "resolve_cell",
    "setting_name",
    "variant_pattern",
    "weight_digests",
]


def expand(config: dict) -> list[dict]:
    """Return the resolved cells of a suite in run order, each with its `path` and `part` of the suite.

    Raises ValueError for a combination that DecodeConfig refuses or that the drafter cannot serve.
    """
    cells, seen = [], set()
    digests = weight_digests(config)
    for part, dataset, variant, setting, seed in _grid(config):
        fields = {"dataset": dataset, "variant": variant.name(config), "setting": setting, "seed": seed}
        path = cell_path(config, **fields)
        if path not in seen:
            seen.add(path)
            cells.append({**resolve_cell(config, **fields, digests=digests), "path": path, "part": part})
    return cells


def resolve_cell(config: dict, *, dataset: str, variant: str, setting: str, seed, digests: dict | None = None) -> dict:
    """Return one cell with everything that decides its records; raises ValueError for names that are not allowed."""
    one_of("dataset", dataset, config["datasets"])
    parsed, (temperature, reasoning) = parse_variant(variant, config), parse_setting(setting)
    if not re.fullmatch("0|[1-9][0-9]*", str(seed)):
        raise ValueError(f"seed: {seed!r} is not allowed (allowed: an integer >= 0); write seed0, seed1, ...")
    seed = int(seed)
    in_headline = replace(parsed, again=False) in headline(config)
    timed = parsed.staged or config["timed"] == "all"
    timed = timed or (config["timed"] and in_headline and seed == config["seeds"][0])
    alone = timed or METHODS[parsed.method].costs
    decode = _settings(config, parsed, temperature=temperature, seed=seed, requests=1 if alone else config["requests"])
    digests = weight_digests(config) if digests is None else digests
    parts = ("target", *METHODS[decode.method].parts_for(decode))
    # named only where the suite decides it, so that cells of other suites and of ar do not hang on it
    special = {} if config["swa_causal"] is None or "drafter" not in parts else {"swa_causal": config["swa_causal"]}
    if config["graft"] is not None:
        special["graft"] = {key: config["graft"][key] for key in ("seed", *parts)}
    check_engine(config["engine"], config.get("forms"), decode)
    if config.get("forms") is not None:
        special["forms"] = config["forms"]
    cell = {
        "suite": config["suite"],
        "engine": config["engine"],
        "target": config["family"],
        "dataset": dataset,
        "domain": pins()[config["source"]][dataset]["domain"],
        "variant": variant,
        "setting": setting,
        "seed": seed,
        "decode": asdict(decode),
        "clock": "stages" if parsed.staged else "wall" if timed else "off",
        "traced": parsed.staged,
        "threads": config["torch_threads"],
        "device": config["device"],
        "dtype": config["dtype"],
        "reasoning": reasoning,
        "template": config["protocol"],
        "prompts": config["prompts"],
        "weights": {part: f"{config['weights']}/{part}" for part in parts},
        "weights_sha256": {part: digests[part] for part in parts},
        **special,
    }
    if is_served(config["engine"]):
        cell["server"] = served_settings(cell, config, draft_rows=draft_rows(config) if "drafter" in parts else None)
    return cell


def _settings(config: dict, variant: Variant, **fields) -> DecodeConfig:
    named = {key: value for key, value in asdict(variant).items() if value is not None}
    named = {key: value for key, value in named.items() if key not in ("staged", "again")}
    fields |= {"max_new_tokens": config["max_new_tokens"], "gdn_backend": config["gdn_backend"]}
    return check(DecodeConfig(**named, **fields), draft_rows(config))


def headline(config: dict) -> list[Variant]:
    """Return the variants of the headline table, in the config's order. Only target_only rows can stand there."""
    return [_variant(config, method) for method in config["methods"]]


def _grid(config: dict):
    """Yield (part, dataset, variant, setting, seed): headline, then sweeps, stages and audit on their sets."""
    for dataset in config["datasets"]:
        for temperature in config["temperatures"]:
            for reasoning in config["reasoning"]:
                setting = setting_name(temperature, reasoning=reasoning)
                # greedy decoding draws nothing, so one seed says all
                for seed in config["seeds"][:1] if temperature < GREEDY_BELOW else config["seeds"]:
                    for variant in headline(config):
                        yield "headline", dataset, variant, setting, seed
    side = setting_name(config["side"]["temperature"], reasoning=config["reasoning"][0])
    for part, variant in _side_variants(config):
        for dataset in sets_of(config, part):
            yield part, dataset, variant, side, config["seeds"][0]


def sets_of(config: dict, part: str) -> list[str]:
    """Return the prompt sets that a sweep, the stages or the audit run on; older plans know the side set alone."""
    return config["datasets"] if part in config.get("everywhere", []) else [config["side"]["dataset"]]


def _side_variants(config: dict):
    for key, (knob, methods) in SWEEPS.items():
        for value in config[key]:
            for method in (method for method in methods if method in config["methods"]):
                yield key, _variant(config, method, **{knob: value})
    if config["stages"]:
        yield from (("stages", replace(variant, staged=True)) for variant in headline(config))
    yield from _audited(config)
    # last, so that a drift of the machine over the run shows in it
    if config["null_control"] and "ar" in config["methods"]:
        yield "null", replace(_variant(config, "ar"), again=True)


def _audited(config: dict):
    if "tfm" in config["methods"]:
        name = _variant(config, "tfm").name(config)
        yield from (("audit", parse_variant(f"{name}-{ending}", config)) for ending in config["audit"])


def _variant(config: dict, method: str, **overrides) -> Variant:
    knobs = {knob: config[knob] for knob in METHODS[method].knobs}
    if "depth_bonus" in METHODS[method].options:
        knobs["depth_bonus"] = config.get("depth_bonus", 0.0)
    knobs |= overrides
    if method in ("dartree", "overgrown"):
        knobs["width"] = overrides.get("width", config["dartree_width"])
    elif "width" in knobs and ("budget" in overrides or knobs["width"] is None):
        knobs["width"] = math.ceil(knobs["budget"] / 16)
    return Variant(method, **knobs)
