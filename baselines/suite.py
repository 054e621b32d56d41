"""A suite's config, checked and expanded into cells. The Snakefile and the `tfm` command both start here."""

import contextlib
import difflib
import functools
import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path

import jsonschema
import yaml

from tfm.config import DARTREE_WIDTH, METHOD_PARTS, RULES, DecodeConfig
from tfm.manifest import sha256_weights, weight_files
from tfm.pins import load_pins

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"
SCHEMA_FILE = WORKFLOWS / "schemas/config.schema.yaml"
PINS_FILE = WORKFLOWS / "config/datasets.yaml"
# which knobs a variant's name spells out, in this order; those in BARE are left out at their default
LETTERS = {"budget": "b", "width": "w", "candidates": "k", "children": "c", "depth": "d"}
KNOBS = {
    "ar": (),
    "dflash": ("depth",),
    "ddtree": ("budget", "depth"),
    "dartree": ("budget", "width", "candidates", "children", "depth"),
    "tfm": ("budget", "width", "candidates", "children", "depth"),
}
BARE = ("candidates", "children", "depth")
SWEEPS = {
    "budgets": ("budget", ("ddtree", "dartree", "tfm")),
    "widths": ("width", ("dartree", "tfm")),
    "candidate_counts": ("candidates", ("tfm",)),
    "children_counts": ("children", ("tfm",)),
    "depths": ("depth", ("dflash", "ddtree", "dartree", "tfm")),
    "residuals": ("residual", ("tfm",)),
}
DEFAULT_RULE = "target_only"
STAGED = "stages"
UNCONDITIONED = "r0"  # the weaver's residual is 0
# figure -> the table that it is drawn from
FIGURE_TABLES = {
    "throughput": "per_set",
    "tau": "per_set",
    "latency": "latency",
    "acceptance_by_position": "acceptance_by_position",
    "sweeps": "sweeps",
}
NUMBER = "[1-9][0-9]*"
SETTING = r"t(?:0|[1-9]\d*)(?:\.\d*[1-9])?(?:-think)?"  # the pattern of setting_name
RESERVED = ("published", "train")  # folders of results/ that are no suite's


@dataclass(frozen=True)
class Variant:
    """A method with all its parameters; `name` spells it and `parse_variant` reads it back."""

    method: str
    budget: int | None = None
    width: int | None = None
    candidates: int | None = None
    children: int | None = None
    depth: int | None = None
    residual: bool = True
    rule: str = DEFAULT_RULE
    staged: bool = False  # stage times and trees are recorded

    def name(self, config: dict) -> str:
        """Return the one name of this variant under a config's defaults."""
        parts = [self.method]
        for knob in KNOBS[self.method]:
            value = getattr(self, knob)
            if knob not in BARE or value != config[knob]:
                parts.append(f"{LETTERS[knob]}{value}")
        parts += [] if self.residual else [UNCONDITIONED]
        parts += [] if self.rule == DEFAULT_RULE else [self.rule]
        return "-".join([*parts, STAGED] if self.staged else parts)


def resolve(raw: dict, *, given: dict | None = None) -> dict:
    """Return the checked config of a suite with command-line strings typed and the section `real` applied.

    `given` holds the values of the command line, already merged into `raw`: they win over the section `real` too.
    Raises ValueError listing every problem with its key, value, allowed values and remedy.
    """
    schema = yaml.safe_load(SCHEMA_FILE.read_text())
    config = _typed({**{key: [] for key in (*SWEEPS, "open") if key != "budgets"}, **raw}, schema)
    if given and "suite" in given and set(raw) <= set(given) and not set(schema["required"]) <= set(raw):
        raise ValueError(
            f"suite: {raw['suite']!r} is a name without a config (a suite stands alone, nano's keys do not fill it); "
            "pass its file with --configfile FILE, or leave suite out for suite nano; nothing was run"
        )
    _raise_if(_schema_problems(config, schema))
    if config.get("data"):
        real = {**config.pop("real", {}), **(given or {})}
        config = _typed({**config, **real}, schema)
        _raise_if(_schema_problems(config, schema))
    defaults = {"data": None, "width": None, "dartree_width": DARTREE_WIDTH, "depth": None, "title": config["suite"]}
    config = defaults | config
    # DIR and DIR/ are one folder, and so they are one job
    config |= {key: os.path.normpath(config[key]) for key in ("data", "weights") if config[key]}
    config.pop("real", None)
    _raise_if(_meaning_problems(config))
    first = {"dataset": config["datasets"][0], "temperature": max(config["temperatures"])}
    config["side"] = {key: first[key] if value is None else value for key, value in config["side"].items()}
    return config


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
    _one_of("dataset", dataset, config["datasets"])
    parsed, (temperature, reasoning) = parse_variant(variant, config), parse_setting(setting)
    if not re.fullmatch("0|[1-9][0-9]*", str(seed)):
        raise ValueError(f"seed: {seed!r} is not allowed (allowed: an integer >= 0); write seed0, seed1, ...")
    seed = int(seed)
    timed = parsed.staged or (parsed in headline(config) and seed == config["seeds"][0])
    knobs = {key: value for key, value in asdict(parsed).items() if key != "staged" and value is not None}
    decode = DecodeConfig(
        temperature=temperature,
        seed=seed,
        max_new_tokens=config["max_new_tokens"],
        requests=1 if timed else config["requests"],
        **knobs,
    ).check(draft_rows(config))
    digests = weight_digests(config) if digests is None else digests
    parts = ("target", *decode.parts)
    return {
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
    }


def headline(config: dict) -> list[Variant]:
    """Return the variants of the headline table, in the config's order. Only target_only rows can stand there."""
    return [_variant(config, method) for method in config["methods"]]


def cell_path(config: dict, *, dataset: str, variant: str, setting: str, seed) -> str:
    """Return the folder of a cell, relative to the repository."""
    head = f"results/{config['suite']}/cells/{config['engine']}/{config['family']}"
    return f"{head}/{dataset}/{variant}/{setting}/seed{seed}"


def setting_name(temperature: float, *, reasoning: bool = False) -> str:
    """Return t0, t1, t0.6, t0.000001, ... (every digit, no exponent), with -think when reasoning is on."""
    digits = Decimal(repr(float(temperature) + 0.0)).normalize()  # + 0.0: no minus before zero
    return f"t{digits:f}" + ("-think" if reasoning else "")


def parse_setting(name: str) -> tuple[float, bool]:
    """Return (temperature, reasoning) of a setting's name; raises ValueError for another spelling of it."""
    match = re.fullmatch(r"t(\d+(?:\.\d+)?)(-think)?", name)
    if not match:
        raise ValueError(f"setting: {name!r} is not allowed (allowed: t0, t1, t0.6, ..., each also with -think)")
    number = float(match[1])
    temperature, reasoning = int(number) if number.is_integer() else number, match[2] is not None
    spelled = setting_name(temperature, reasoning=reasoning) if math.isfinite(number) else "a finite number"
    if spelled != name:
        raise ValueError(f"setting: {name!r} is another spelling; write {spelled!r}, the name of that cell")
    return temperature, reasoning


def parse_variant(name: str, config: dict) -> Variant:
    """Return the variant that `name` spells; raises ValueError for an unknown method or another name's spelling."""
    method, *parts = name.split("-")
    _one_of("method", method, sorted(KNOBS))
    match = re.fullmatch(variant_pattern(method, groups=True), name)
    if not match:
        example = "-".join([method, *(f"{LETTERS[knob]}N" for knob in KNOBS[method] if knob not in BARE)])
        optional = [f"-{LETTERS[knob]}N" for knob in KNOBS[method] if knob in BARE]
        optional += [f"-{UNCONDITIONED}"] if "weaver" in METHOD_PARTS[method] else []
        raise ValueError(
            f"variant: {name!r} is not allowed (allowed: {example}, then any of {', '.join(optional) or 'nothing'}, "
            f"a rule of {', '.join(RULES)}, and -{STAGED}; N is at least 1); write the name in that order"
        )
    found = match.groupdict()
    knobs = {knob: int(found[knob]) if found.get(knob) else config[knob] for knob in KNOBS[method]}
    variant = Variant(
        method,
        **knobs,
        residual=found.get("residual") is None,
        rule=found["rule"] or DEFAULT_RULE,
        staged=found["staged"] is not None,
    )
    if variant.name(config) != name:
        raise ValueError(
            f"variant: {name!r} spells out a default; write {variant.name(config)!r}, the name of that cell"
        )
    return variant


def variant_pattern(method: str, *, groups: bool = False) -> str:
    """Return the regular expression of a method's variant names; `groups` names its parts."""
    pattern = method
    for knob in KNOBS[method]:
        number = f"(?P<{knob}>{NUMBER})" if groups else NUMBER
        pattern += f"(?:-{LETTERS[knob]}{number})?" if knob in BARE else f"-{LETTERS[knob]}{number}"
    if "weaver" in METHOD_PARTS[method]:
        pattern += f"(?:-(?P<residual>{UNCONDITIONED}))?" if groups else f"(?:-{UNCONDITIONED})?"
    rules = "|".join(rule for rule in RULES if rule != DEFAULT_RULE)
    rule, staged = (f"(?P<rule>{rules})", f"(?P<staged>{STAGED})") if groups else (f"(?:{rules})", STAGED)
    return f"{pattern}(?:-{rule})?(?:-{staged})?"


@functools.cache
def pins() -> dict:
    """Return the pins of all prompt sets, by source and name."""
    return load_pins(PINS_FILE)


def draft_rows(config: dict) -> int | None:
    """Return how many positions the drafter drafts, None when its config.json is not here."""
    path = Path(config["weights"]) / "drafter/config.json"
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    block_size = (fields.get("dflash_config") or {}).get("block_size") or fields.get("block_size")
    if not block_size:
        from tfm.drafter import DrafterConfig  # needs torch, whose import takes seconds

        block_size = DrafterConfig.from_dict(fields).block_size
    return block_size - 1


def missing_weights(config: dict) -> list[str]:
    """Return the folders of the parts that the suite's methods need and that hold no file."""
    parts = dict.fromkeys(["target", *(part for method in config["methods"] for part in METHOD_PARTS[method])])
    folders = [f"{config['weights']}/{part}" for part in parts]
    return [folder for folder in folders if not weight_files(Path(folder))]


def weight_digests(config: dict) -> dict[str, str | None]:
    """Return the digest of each part's checkpoint folder; None for one that is not here."""
    return {part: sha256_weights(Path(config["weights"]) / part) for part in ("target", "drafter", "weaver")}


def _grid(config: dict):
    """Yield (part, dataset, variant, setting, seed): headline, then sweeps, stages and audit on the side set."""
    for dataset in config["datasets"]:
        for temperature in config["temperatures"]:
            for reasoning in config["reasoning"]:
                setting = setting_name(temperature, reasoning=reasoning)
                # greedy decoding draws nothing, so one seed says all
                for seed in config["seeds"][:1] if temperature == 0 else config["seeds"]:
                    for variant in headline(config):
                        yield "headline", dataset, variant, setting, seed
    side = setting_name(config["side"]["temperature"], reasoning=config["reasoning"][0])
    where = (config["side"]["dataset"], side, config["seeds"][0])
    for part, variant in _side_variants(config):
        yield part, where[0], variant, where[1], where[2]


def _side_variants(config: dict):
    for key, (knob, methods) in SWEEPS.items():
        for value in config[key]:
            for method in (method for method in methods if method in config["methods"]):
                yield key, _variant(config, method, **{knob: value})
    if config["stages"]:
        yield from (("stages", replace(variant, staged=True)) for variant in headline(config))
    if "tfm" in config["methods"]:
        yield from (("audit", replace(_variant(config, "tfm"), rule=rule)) for rule in config["audit"])


def _variant(config: dict, method: str, **overrides) -> Variant:
    knobs = {knob: config[knob] for knob in KNOBS[method]} | overrides
    if method == "dartree":
        knobs["width"] = overrides.get("width", config["dartree_width"])
    elif "width" in knobs and ("budget" in overrides or knobs["width"] is None):
        knobs["width"] = math.ceil(knobs["budget"] / 16)
    return Variant(method, **knobs)


def _meaning_problems(config: dict) -> list[str]:
    problems, named = [], {}
    if config["suite"] in RESERVED:
        problems.append(
            f"suite: {config['suite']!r} is not allowed (allowed: any name but {', '.join(RESERVED)}, which are "
            "folders of results/); choose another name"
        )
    for value in config["temperatures"]:
        if not math.isfinite(value):
            problems.append(f"temperatures: {value!r} is not allowed (allowed: finite numbers >= 0); use 0 for greedy")
        elif (first := named.setdefault(setting_name(value), value)) is not value:
            problems.append(
                f"temperatures: {value!r} is not allowed (allowed: each once; {first!r} has the same name, "
                f"{setting_name(value)}); remove one of them"
            )
    for key, inside in (("dataset", "datasets"), ("temperature", "temperatures")):
        value = config["side"][key]
        if value is not None and value not in config[inside]:
            problems.append(
                _refusal(f"side.{key}", value, config[inside], f"choose one of the suite's {inside}, or null")
            )
    problems += [*_dataset_problems(config), *_limit_problems(config)]
    for figure in (name for name in config["figures"] if FIGURE_TABLES[name] not in config["tables"]):
        needed = FIGURE_TABLES[figure]
        remedy = f"it is drawn from table {needed}: add {needed} to tables, or leave the figure out"
        allowed = [name for name, table in FIGURE_TABLES.items() if table in config["tables"]]
        problems.append(_refusal("figures", figure, allowed or ["none with these tables"], remedy))
    rows = draft_rows(config)
    for key, values in (("depth", [config["depth"]]), ("depths", config["depths"])):
        for value in values:
            if rows is not None and value is not None and value > rows:
                problems.append(
                    f"{key}: {value} is not allowed (allowed: 1 to {rows}, the drafter's rows); lower {key}"
                )
    return problems


def _limit_problems(config: dict) -> list[str]:
    """Return what exceeds the context, the target's sizes or the candidates; weights that are not here refuse nothing.

    Sizes are read from the target's config.json.
    """
    problems = []

    def at_most(key: str, value: int, limit: int | None, why: str) -> None:
        if limit is not None and value > limit:
            problems.append(f"{key}: {value} is not allowed (allowed: 1 to {limit}, {why}); lower {key}")

    path = Path(config["weights"]) / "target/config.json"
    fields = json.loads(path.read_text()) if path.exists() else {}
    sizes = fields.get("text_config") or fields
    at_most("context", config["context"], sizes.get("max_position_embeddings"), "the positions that the target holds")
    at_most("max_new_tokens", config["max_new_tokens"], config["context"] - 1, "context less one prompt token")
    if {"dartree", "tfm"} & set(config["methods"]):
        vocabulary = "the target's vocabulary"
        at_most("candidates", config["candidates"], sizes.get("vocab_size"), vocabulary)
        for value in config["candidate_counts"]:
            at_most("candidate_counts", value, sizes.get("vocab_size"), vocabulary)
        at_most("children", config["children"], min([config["candidates"], *config["candidate_counts"]]), "candidates")
        for value in config["children_counts"]:
            at_most("children_counts", value, config["candidates"], "candidates")
    for name in config["datasets"]:
        rows = pins()[config["source"]].get(name, {}).get("rows")
        at_most("prompts", config["prompts"], rows, f"the rows of {name}; prompts are never repeated")
    return problems


def _dataset_problems(config: dict) -> list[str]:
    known, source = pins(), config["source"]
    problems = []
    for name in (name for name in config["datasets"] if name not in known[source]):
        elsewhere = " or ".join(f"source {other}" for other in ("embedded", "local", "hub") if name in known[other])
        remedy = (
            f"it is offered by {elsewhere}; real sets need data=DIR" if elsewhere else "choose one of the allowed names"
        )
        problems.append(_refusal("datasets", name, list(known[source]), remedy))
    if source == "local" and config["data"] is None:
        problems.append("data: null is not allowed with source local; give the folder of the sets, --config data=DIR")
    elif config["data"] is not None and not Path(config["data"]).is_dir():
        problems.append(f"data: {config['data']!r} is not a folder; give the folder that holds the sets' .jsonl files")
    elif source == "local":
        for name in (name for name in config["datasets"] if name in known["local"]):
            file = known["local"][name]["file"]
            if not (Path(config["data"]) / file).is_file():
                problems.append(
                    f"data: {config['data']!r} is not allowed (allowed: a folder with {file}, which {name} needs); "
                    f"put the file there (source: {known['local'][name]['source']}), or leave the set out"
                )
    return problems


def _refusal(key: str, value, allowed, remedy: str) -> str:
    names = ", ".join(map(str, allowed))
    return f"{key}: {_shown(value)} is not allowed (allowed: {names}); {_did_you_mean(value, allowed)}{remedy}"


def _schema_problems(config: dict, schema: dict) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    problems: list[str] = []
    for error in sorted(validator.iter_errors(config), key=lambda error: [str(part) for part in error.path]):
        problems += _explain(error)
    return problems


def _explain(error: jsonschema.ValidationError) -> list[str]:
    """Return our words for one schema error: key, value, allowed values, remedy."""
    # items of a list are described by the list
    path = [part for part in error.absolute_path if isinstance(part, str)]
    key, here = ".".join(path), error.schema
    if error.validator == "additionalProperties":
        known = sorted(here["properties"])
        prefix = f"{key}." if key else ""
        return [
            f"{prefix}{name}: unknown key; {_did_you_mean(name, known)}allowed keys: {', '.join(known)}"
            for name in sorted(set(error.instance) - set(known))
        ]
    if error.validator == "required":
        # one error a missing key; its message starts with the quoted name
        name = next(name for name in error.validator_value if error.message.startswith(repr(name)))
        meaning = here["properties"][name].get("description", "")
        return [f"{'.'.join([*path, name])}: missing key; add it ({meaning})"]
    allowed = ", ".join(map(str, error.validator_value)) if error.validator == "enum" else _allowed(here)
    hint = _did_you_mean(error.instance, error.validator_value) if error.validator == "enum" else ""
    meaning = _description(path)
    return [f"{key}: {_shown(error.instance)} is not allowed (allowed: {allowed}); {hint}{key} is {meaning}"]


def _description(path: list[str]) -> str:
    node = yaml.safe_load(SCHEMA_FILE.read_text())
    for part in path:
        node = node.get("properties", {}).get(part, {})
    return node.get("description", "described in workflows/schemas/config.schema.yaml")


def _allowed(schema: dict) -> str:
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kinds = schema.get("type", "a value")
    text = " or ".join(kinds) if isinstance(kinds, list) else f"{'an' if kinds[0] in 'aeio' else 'a'} {kinds}"
    text += f" >= {schema['minimum']}" if "minimum" in schema else ""
    text += f" matching {schema['pattern']}" if "pattern" in schema else ""
    text += " with at least one entry" if schema.get("minItems") or schema.get("minLength") else ""
    return text + (", each once" if schema.get("uniqueItems") else "")


def _shown(value) -> str:
    return "null" if value is None else repr(value)


def _did_you_mean(value, allowed) -> str:
    close = difflib.get_close_matches(str(value), [str(name) for name in allowed], n=1, cutoff=0.5)
    return f"did you mean {close[0]}? " if close else ""


def _one_of(key: str, value: str, allowed) -> None:
    if value not in allowed:
        raise ValueError(_refusal(key, value, allowed, f"choose one of the allowed values for {key}"))


def _typed(config: dict, schema: dict) -> dict:
    """Return the config with command-line strings and single values turned into what the schema asks for."""
    return {key: _as_type(value, schema["properties"].get(key, {})) for key, value in config.items()}


def _as_type(value, schema: dict):
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value == "null" and kinds != ["string"]:
        return None
    if isinstance(value, dict) and "properties" in schema:
        return _typed(value, schema)
    if "array" in kinds and value is not None and not isinstance(value, list | dict):
        parts = value.split(",") if isinstance(value, str) else [value]
        value = [part.strip() if isinstance(part, str) else part for part in parts]
    if isinstance(value, list):
        return [_as_type(item, schema.get("items", {})) for item in value]
    if isinstance(value, str) and {"integer", "number", "boolean"} & set(kinds):
        if value.lower() in ("nan", "inf", "-inf"):
            return float(value)
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            return value
        if isinstance(parsed, str) and "number" in kinds:
            with contextlib.suppress(ValueError):
                parsed = float(parsed)  # YAML takes 1e-6 for a word
        value = parsed if isinstance(parsed, int | float) else value
    # 64.0 would name another cell than 64
    return int(value) if isinstance(value, float) and value.is_integer() and "boolean" not in kinds else value


def _raise_if(problems: list[str]) -> None:
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"the config has {len(problems)} problem{'s' * (len(problems) > 1)}; nothing was run\n{lines}")
