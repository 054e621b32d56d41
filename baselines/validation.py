"""A suite's config, typed and checked before anything runs: every problem at once, each with key, value and remedy."""

import contextlib
import functools
import math
import os
from pathlib import Path

import jsonschema
import yaml

from baselines import parts
from baselines.inputs import WORKFLOWS, checkpoint_config, draft_rows, pins
from baselines.methods import METHODS, SWEEPS
from baselines.names import setting_name
from baselines.refusals import did_you_mean, refusal, shown
from tfm.config import DecodeConfig

SCHEMA_FILE = WORKFLOWS / "schemas/config.schema.yaml"
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
RESERVED = ("published", "train", "rebuilt")  # folders of results/ that are no suite's
# what `resolve` adds to a config and readers of a plan rely on; keys that are newer than a published plan are not here
ADDED = ("title", "open", "timed", "data", "width", "depth", "dartree_width", "gdn_backend")
# figure -> the table that it is drawn from
FIGURE_TABLES = {
    "throughput": "per_set",
    "tau": "per_set",
    "latency": "latency",
    "acceptance_by_position": "acceptance_by_position",
    "sweeps": "sweeps",
    "ceiling_position": "ceiling",
    "ceiling_length": "ceiling",
    "kernels": "kernels",
}


@functools.cache
def read_schema() -> dict:
    """Return the schema of a config; do not change it."""
    return yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8"))


def check_file(path: Path | str) -> None:
    """Raise ValueError for a config file that says a key twice: YAML keeps the last one and says nothing."""
    pending, problems = [(yaml.compose(Path(path).read_text(encoding="utf-8")), "")], []
    while pending:
        node, where = pending.pop()
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                name, line = f"{where}{key.value}", key.start_mark.line + 1
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    problems.append(f"{name}: is in {path} twice, lines {seen[key.value]} and {line}; remove one")
                seen[str(key.value)] = line
                pending.append((value, f"{name}."))
        elif isinstance(node, yaml.SequenceNode):
            pending += [(item, where) for item in node.value]
    _raise_if(problems)


def resolve(raw: dict, *, given: dict | None = None) -> dict:
    """Return the checked config of a suite with command-line strings typed and the section `real` applied.

    `given` holds the values of the command line, already merged into `raw`: they win over the section `real` too.
    Raises ValueError listing every problem with its key, value, allowed values and remedy.
    """
    schema = read_schema()
    config = _typed({**{key: [] for key in (*SWEEPS, "open") if key != "budgets"}, **raw}, schema)
    if given and "suite" in given and set(raw) <= set(given) and not set(schema["required"]) <= set(raw):
        raise ValueError(
            f"suite: {raw['suite']!r} is a name without a config (a suite stands alone, nano's keys do not fill it); "
            "pass its file with --configfile FILE, or leave suite out for suite nano; nothing was run"
        )
    _raise_if([*_schema_problems(config, schema), *_unknown_keys(config, schema)])
    if config.get("data"):
        real = {**config.pop("real", {}), **(given or {})}
        config = _typed({**config, **real}, schema)
        _raise_if(_schema_problems(config, schema))
    absent = ("data", "width", "dartree_width", "depth", "swa_causal", "graft", "caption", "obtain")
    absent += ("ceiling", "oracle", "kernels")  # probes
    defaults = dict.fromkeys(absent) | {"title": config["suite"], "checkpoints": {}, "servers": {}}
    defaults |= {"fixed": [], "timed": True, "everywhere": []}
    defaults |= {"null_control": False, "bench": False}
    defaults |= {"gdn_backend": DecodeConfig.gdn_backend, "depth_bonus": DecodeConfig.depth_bonus}
    defaults |= {"server_python": "python", "server_port": None, "server_seconds": 900, "server_flags": {}}
    config = defaults | config
    # DIR and DIR/ are one folder, and so they are one job
    config |= {key: os.path.normpath(config[key]) for key in ("data", "weights") if config[key]}
    config.pop("real", None)
    _raise_if([*_meaning_problems(config), *_fixed_problems(config, given or {})])
    first = {"dataset": config["datasets"][0], "temperature": max(config["temperatures"])}
    config["side"] = {key: first[key] if value is None else value for key, value in config["side"].items()}
    return config


def _unknown_keys(config: dict, schema: dict) -> list[str]:
    """Return the names of no key where a config names its own keys: the section `real`, and `fixed`."""
    known = sorted(schema["properties"])
    names = [(f"real.{name}", name) for name in config.get("real", {})]
    names += [(f"fixed: {name!r}", name) for name in config.get("fixed", [])]
    return [
        f"{where}: unknown key; {did_you_mean(name, known)}allowed keys: {', '.join(known)}"
        for where, name in names
        if name not in known
    ]


def problem_of_resolved(config: dict) -> str | None:
    """Return the first thing in which the config of a plan is not one that `resolve` wrote; None for nothing.

    What lies beside a config (weights, prompt sets, pins) is not looked at: a plan may be read where they are not.
    """
    schema = read_schema()
    lacking = [key for key in (*schema["required"], *ADDED) if key not in config]
    return f"{lacking[0]}: missing key" if lacking else next(iter(_schema_problems(config, schema)), None)


def _meaning_problems(config: dict) -> list[str]:
    problems, named = [], {}
    if config["suite"] in RESERVED:
        problems.append(
            f"suite: {config['suite']!r} is not allowed (allowed: any name but {', '.join(RESERVED)}, which are "
            "folders of results/); choose another name"
        )
    for value in config["temperatures"]:
        if not _is_finite(value):
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
                refusal(f"side.{key}", value, config[inside], f"choose one of the suite's {inside}, or null")
            )
    for key, values in (("depth_bonus", [config["depth_bonus"]]), ("depth_bonuses", config["depth_bonuses"])):
        for value in values:
            if not (_is_finite(value) and value <= 0):
                problems.append(f"{key}: {value!r} is not allowed (allowed: finite numbers <= 0); use 0 for none")
    if not _is_finite(config["server_seconds"]):
        problems.append(f"server_seconds: {config['server_seconds']} is not allowed (allowed: a finite number > 0)")
    for key in ("data", "weights"):
        if config[key] and (found := sorted({*config[key]} & {*"{}\n"})):
            problems.append(
                f"{key}: {config[key]!r} is not allowed (allowed: a path without braces and line breaks, which a "
                f"workflow reads as its own: {' '.join(map(repr, found))}); rename the folder, or give a link to it"
            )
    kernels = config["kernels"]
    if kernels and kernels["value_heads"] % kernels["key_heads"]:
        problems.append(
            f"kernels.value_heads: {kernels['value_heads']} is not allowed (allowed: multiples of key_heads, "
            f"{kernels['key_heads']}); change one of them"
        )
    if config["graft"] and config["heads"]:
        problems.append(f"heads: {config['heads']} is not allowed with a graft (allowed: none), which widens no head")
    problems += [*_dataset_problems(config), *_limit_problems(config), *parts.problems(config)]
    for figure in (name for name in config["figures"] if FIGURE_TABLES[name] not in config["tables"]):
        needed = FIGURE_TABLES[figure]
        remedy = f"it is drawn from table {needed}: add {needed} to tables, or leave the figure out"
        allowed = [name for name, table in FIGURE_TABLES.items() if table in config["tables"]]
        problems.append(refusal("figures", figure, allowed or ["none with these tables"], remedy))
    if {"dartree", "overgrown"} & set(config["methods"]) and config["dartree_width"] is None:
        problems.append(
            "dartree_width: missing key; add it (live branches a depth of dartree, 12 in its authors' code)"
        )
    rows = draft_rows(config)
    for key, values in (("depth", [config["depth"]]), ("depths", config["depths"])):
        for value in values:
            if rows is not None and value is not None and value > rows:
                problems.append(
                    f"{key}: {value} is not allowed (allowed: 1 to {rows}, the drafter's rows); lower {key}"
                )
    return problems


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _fixed_problems(config: dict, given: dict) -> list[str]:
    """Return the keys that the command line changes although the suite's name stands for their values."""
    changed = sorted(set(given) & set(config["fixed"]))
    if not changed or "suite" in given or config["data"]:  # data=DIR gives the suite another name
        return []
    return [
        f"{key}: {given[key]!r} is not allowed in suite {config['suite']} (allowed: the value of its file, which that "
        "name stands for); add suite=NAME, a name of your own for the changed protocol"
        for key in changed
    ]


def _limit_problems(config: dict) -> list[str]:
    """Return what exceeds the context, the target's sizes or the candidates; weights that are not here refuse nothing.

    Sizes are read from the target's config.json.
    """
    problems = []

    def at_most(key: str, value: int | None, limit: int | None, why: str) -> None:
        if limit is not None and value is not None and value > limit:
            problems.append(f"{key}: {value} is not allowed (allowed: 1 to {limit}, {why}); lower {key}")

    fields = checkpoint_config(config, "target")
    sizes = fields.get("text_config") or fields
    at_most("context", config["context"], sizes.get("max_position_embeddings"), "the positions that the target holds")
    at_most("max_new_tokens", config["max_new_tokens"], config["context"] - 1, "context less one prompt token")
    if any("candidates" in METHODS[method].knobs for method in config["methods"]):
        vocabulary = "the target's vocabulary"
        at_most("candidates", config["candidates"], sizes.get("vocab_size"), vocabulary)
        counts = {key: config[key] for key in ("candidate_counts", "dartree_candidate_counts")}
        for key, values in counts.items():
            for value in values:
                at_most(key, value, sizes.get("vocab_size"), vocabulary)
        fewest = min([config["candidates"], *(value for values in counts.values() for value in values)])
        at_most("children", config["children"], fewest, "candidates")
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
        problems.append(refusal("datasets", name, list(known[source]), remedy))
    if source == "local" and config["data"] is None:
        problems.append("data: null is not allowed with source local; give the folder of the sets, --config data=DIR")
    elif config["data"] is not None and source != "local":
        problems.append(
            f"data: {config['data']!r} is not allowed with source {source} (allowed: null); leave data out, or set "
            "source to local with sets of that source"
        )
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
            f"{prefix}{name}: unknown key; {did_you_mean(name, known)}allowed keys: {', '.join(known)}"
            for name in sorted(set(error.instance) - set(known))
        ]
    if error.validator == "required":
        # one error a missing key; its message starts with the quoted name
        name = next(name for name in error.validator_value if error.message.startswith(repr(name)))
        meaning = here["properties"][name].get("description", "")
        return [f"{'.'.join([*path, name])}: missing key; add it ({meaning})"]
    allowed = ", ".join(map(str, error.validator_value)) if error.validator == "enum" else _allowed(here)
    hint = did_you_mean(error.instance, error.validator_value) if error.validator == "enum" else ""
    meaning = _description(path)
    return [f"{key}: {shown(error.instance)} is not allowed (allowed: {allowed}); {hint}{key} is {meaning}"]


def _description(path: list[str]) -> str:
    node = read_schema()
    for part in path:
        node = node.get("properties", {}).get(part, {})
    return node.get("description", "described in workflows/schemas/config.schema.yaml")


def _allowed(schema: dict) -> str:
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kinds = schema.get("type", "a value")
    text = " or ".join(kinds) if isinstance(kinds, list) else f"{'an' if kinds[0] in 'aeio' else 'a'} {kinds}"
    text += f" >= {schema['minimum']}" if "minimum" in schema else ""
    text += f"{' and' * ('minimum' in schema)} <= {schema['maximum']}" if "maximum" in schema else ""
    text += f" matching {schema['pattern']}" if "pattern" in schema else ""
    text += f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    text += " with at least one entry" if schema.get("minItems") or schema.get("minLength") else ""
    return text + (", each once" if schema.get("uniqueItems") else "")


def _typed(config: dict, schema: dict) -> dict:
    """Return the config with command-line strings and single values turned into what the schema asks for."""
    return {key: _as_type(value, schema["properties"].get(key, {})) for key, value in config.items()}


def _as_type(value, schema: dict):
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value == "null" and kinds != ["string"]:
        return None
    if isinstance(value, dict):
        return _typed(value, schema) if "properties" in schema else {key: _plain(item) for key, item in value.items()}
    if "array" in kinds and value is not None and not isinstance(value, list | dict):
        parts = value.split(",") if isinstance(value, str) else [value]
        value = [part.strip() if isinstance(part, str) else part for part in parts]
    if isinstance(value, list):
        return [_as_type(item, schema.get("items", {})) for item in value]
    if isinstance(value, str) and ("boolean" in kinds or any(word is True for word in schema.get("enum", ()))):
        value = SWITCHES.get(value.strip().lower(), value)
    if isinstance(value, str) and {"integer", "number"} & set(kinds):
        value = _number(value)
    # 64.0 would name another cell than 64
    is_whole = isinstance(value, float) and value.is_integer() and (abs(value) < 2**53 or "number" not in kinds)
    return int(value) if is_whole and "boolean" not in kinds else value


def _number(text: str) -> int | float | str:
    """Return the decimal number that a text spells, as Snakemake reads it; the text itself where it spells none.

    YAML would take 064 for an octal 52 and 1:30 for 90.
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _plain(value):
    """Return a value of a free-form object, whose words true, false and null reach us as text from a command line."""
    return (SWITCHES | {"null": None}).get(value, value) if isinstance(value, str) else value


def _raise_if(problems: list[str]) -> None:
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"the config has {len(problems)} problem{'s' * (len(problems) > 1)}; nothing was run\n{lines}")
