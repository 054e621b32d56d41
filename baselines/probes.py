"""What a suite measures beside its cells (ceiling, oracle tree, GDN kernel): settings, and why one is left out."""

from baselines import suite
from baselines.inputs import weight_digests
from baselines.names import cell_path, setting_name

# what each probe writes, below results/<suite>/; the first file names the SHA-256 of the others
FILES = {
    "ceiling": ("ceiling/ceiling.json", "ceiling/anchors.parquet"),
    "oracle": ("oracle/oracle.json", "oracle/steps.parquet", "oracle/answers.parquet"),
    "kernels": ("kernels/kernels.json", "kernels/samples.parquet", "kernels/checks.parquet"),
    "definitions": ("definitions/definitions.json",),
    "builders": ("builders/builders.json", "builders/samples.parquet"),
    "lossless": ("lossless/lossless.json",),
    "families": ("families/families.json", "families/requests.parquet"),
}
SCRIPTS = {
    "ceiling": "estimate_ceiling",
    "oracle": "estimate_oracle",
    "kernels": "bench_kernel",
    "definitions": "check_definitions",
}
# probe -> the tables made of it
TABLES = {
    "ceiling": ("ceiling", "ceiling_claims"),
    "oracle": ("oracle",),
    "kernels": ("kernels",),
    "builders": ("builders",),
    "lossless": ("lossless",),
    "families": ("families",),
}
# probe -> why no job of a suite makes it, and the script that does
BY_HAND = {
    "builders": ("no job times builders", "bench_builders"),
    "lossless": ("no job compares all methods in float32", "check_lossless"),
    "families": ("no job trains another family", "compare_families"),
}
PARTS = ("target", "drafter", "weaver")


def planned(config: dict) -> list[str]:
    """Return the probes that the suite runs: the definitions, and those that a table needs and nothing prevents."""
    wanted = [probe for probe, names in TABLES.items() if set(names) & set(config["tables"])]
    return [*(probe for probe in wanted if not why_not(probe, config)), "definitions"]


def why_not(probe: str, config: dict) -> str:
    """Return why a suite cannot run a probe, with the remedy; empty when it can."""
    if probe in BY_HAND:
        why, script = BY_HAND[probe]
        return f"{why}; run workflows/scripts/{script}.py --out results/{config['suite']}/{probe}"
    if config.get(probe) is None:
        return f"{probe} is null in the config; give its settings"
    if probe == "kernels":
        return ""
    if probe == "ceiling" and ("ar" not in config["methods"] or not {"tfm", "dartree"} & set(config["methods"])):
        return "the ceiling needs ar's answers, a drafter and a weaver; add ar and tfm to methods"
    if probe == "oracle" and ("ar" not in config["methods"] or len(config["methods"]) == 1):
        return "the oracle tree is held against methods that draft, the entropy is of ar's answers; add both to methods"
    if not any(temperature > 0 for temperature in config["temperatures"]):
        return "at T = 0 the target's law is one token, which the oracle marginal knows; add a temperature above 0"
    return ""


def ceiling(config: dict) -> dict:
    """Return everything that decides the ceiling's records: answers, weights, sizes and seed."""
    temperature, reasoning = max(config["temperatures"]), config["reasoning"][0]
    setting, seed = setting_name(temperature, reasoning=reasoning), config["seeds"][0]
    think = "-think" if reasoning else ""
    digests = weight_digests(config)
    prompts = f"results/{config['suite']}/prompts/{config['family']}"
    return {
        **{key: config["ceiling"][key] for key in ("prompts", "anchors", "continuations")},
        "cells": [
            cell_path(config, dataset=dataset, variant="ar", setting=setting, seed=seed)
            for dataset in config["datasets"]
        ],
        "prompts_files": [f"{prompts}/{dataset}{think}.jsonl" for dataset in config["datasets"]],
        "setting": setting,
        "temperature": temperature,
        "seed": seed,
        "candidates": config["candidates"],
        "weights": {part: f"{config['weights']}/{part}" for part in PARTS},
        "weights_sha256": {part: digests[part] for part in PARTS},
        "device": config["device"],
        "dtype": "float32",
        "threads": config["torch_threads"],
    }


def oracle(config: dict) -> dict:
    """Return everything that decides the oracle's records: the headline's cells, the target, sizes and seed."""
    temperature, reasoning = max(config["temperatures"]), config["reasoning"][0]
    where = {"setting": setting_name(temperature, reasoning=reasoning), "seed": config["seeds"][0]}
    names = [variant.name(config) for variant in suite.headline(config)]
    think = "-think" if reasoning else ""
    prompts = f"results/{config['suite']}/prompts/{config['family']}"
    return {
        **config["oracle"],
        **where,
        "cells": [
            cell_path(config, dataset=dataset, variant=name, **where)
            for dataset in config["datasets"]
            for name in names
        ],
        "prompts_files": {dataset: f"{prompts}/{dataset}{think}.jsonl" for dataset in config["datasets"]},
        "chain_budget": config["budget"],
        "weights": {"target": f"{config['weights']}/target"},
        "weights_sha256": {"target": weight_digests(config)["target"]},
        "device": config["device"],
        "threads": config["torch_threads"],
    }


def kernels(config: dict) -> dict:
    """Return everything that decides the kernel's records: sizes, shapes, heads, rounds and device."""
    fixed = {"device": config["device"], "threads": config["torch_threads"], "seed": config["seeds"][0]}
    return {**config["kernels"], **fixed}


def definitions(config: dict) -> dict:
    """Return where the training curve of the suite's weaver lies; the rest is the code's."""
    return {"weights": config["weights"]}


SETTINGS = {"ceiling": ceiling, "oracle": oracle, "kernels": kernels, "definitions": definitions}
