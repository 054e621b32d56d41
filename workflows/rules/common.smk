# Everything that computes: validation, names, and the functions that rules call. Rules are data.
import functools
import json
import os
import shlex
import sys
import time
from pathlib import Path

# this checkout first, whatever an editable install of another one says
sys.path.insert(0, str(workflow.basedir))

from baselines import engine_names, probes, suite
from baselines.methods import METHODS
from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from tfm.manifest import loader_digest, script_digest, source_digest, weight_files
from tfm.pins import unpinned

# rules say "python", so that a printed command works by itself; here it is the one that runs Snakemake
shell.prefix(
    f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    f" PYTHONPATH={shlex.quote(str(workflow.basedir))}:$PYTHONPATH; "
)
PYTHON = "python"
CELL_FILES = ("requests.parquet", "steps.parquet", "trees.parquet", "cell.json")
# the first one of each stands in Snakemake's own report
TABLE_FORMS, FIGURE_FORMS = ("csv", "md", "tex"), ("svg", "pdf", "png", "txt")


def checked(function, *arguments, **named):
    """Call one of our functions and show its refusal as a message instead of a traceback."""
    try:
        return function(*arguments, **named)
    except ValueError as error:
        raise WorkflowError(str(error)) from None


for file in workflow.config_settings.configfiles or ["workflows/config/nano.yaml"]:
    checked(suite.check_file, file)
config = checked(suite.resolve, config, given=workflow.config_settings.config)
DIGESTS = suite.weight_digests(config)
CELLS = checked(suite.expand, config)
# a cluster gives a job what it asks for: a suite of a CPU asks for no card
GPUS = int(config["device"] == "cuda")
if workflow.is_main_process:
    for folder in suite.missing_weights(config):
        logger.warning(
            f"weights: {folder} holds no file; its jobs are listed, but they stop"
        )
    if suite.missing_weights(config) and config["obtain"]:
        logger.warning(f"weights: to put them there: {config['obtain']}")
    names = config["datasets"] if config["source"] == "hub" else []
    for name in unpinned(suite.pins(), names):
        logger.warning(
            f"revision: {name} is unpinned and its prompts cannot be prepared; run `tfm pin` where the hub is reached"
        )


def alternatives(names):
    """Return a pattern that matches any of the names; nothing else, so that a typo has no rule but `refuse_cell`."""
    return "|".join(re.escape(str(name)) for name in names)


ENGINE, TARGET, DATASET = (
    alternatives(names)
    for names in ([config["engine"]], [config["family"]], config["datasets"])
)
VARIANT = "|".join(suite.variant_pattern(method) for method in config["methods"])
SETTING, SEED = suite.SETTING, "0|[1-9][0-9]*"
NO_CELL = f"(?!(?:{ENGINE})/(?:{TARGET})/(?:{DATASET})/(?:{VARIANT})/{SETTING}/seed(?:{SEED})/[^/]*$).+"


# every function of a cell's rule asks for its cell; a suite may have thousands
CELL_KEYS = ("dataset", "variant", "setting", "seed")
RESOLVED = {
    tuple(str(cell[key]) for key in CELL_KEYS): {
        key: value for key, value in cell.items() if key not in ("path", "part")
    }
    for cell in CELLS
}


def cell_of(wildcards):
    """Return the resolved cell that a path names."""
    fields = {key: wildcards[key] for key in CELL_KEYS}
    if (key := tuple(fields.values())) not in RESOLVED:
        RESOLVED[key] = checked(suite.resolve_cell, config, **fields, digests=DIGESTS)
    return RESOLVED[key]


def cell_json(wildcards):
    """Return the resolved cell as JSON: a changed value reruns exactly the cells it is in."""
    return json.dumps(cell_of(wildcards), sort_keys=True)


# the suite's engine where its cells are served, whose rule stands above decode_cell; else a pattern without a match
SERVED = ENGINE if engine_names.is_served(config["engine"]) else "(?!)"
# where a server lives decides no record: no parameter of the rule, so that another place runs no finished cell again
SERVER = f"--server-python {shlex.quote(config['server_python'])} --server-seconds {config['server_seconds']}"
SERVER += f" --server-port {config['server_port']}" if config["server_port"] else ""


@functools.cache
def digest_of(engine, forms, method, gdn_backend):
    decode = {"method": method, "gdn_backend": gdn_backend}
    return engine_names.source_of({"engine": engine, "forms": forms, "decode": decode})


# of a script and all it imports, comments left out: a change of it redoes what the script made
script_code = functools.cache(script_digest)


def cell_source(wildcards):
    """Return the digests of the code that decides the cell's records: a change of it reruns the cells it made stale."""
    cell, decode = cell_of(wildcards), cell_of(wildcards)["decode"]
    code = decode["method"], decode["gdn_backend"]
    return f"{digest_of(cell['engine'], cell.get('forms'), *code)} {loader_digest()}"


def cell_threads(wildcards):
    """Return all cores for a timed cell, which then runs alone, and 1 for the others."""
    return 1 if cell_of(wildcards)["clock"] == "off" else all_cores(wildcards)


def all_cores(wildcards):
    """Return the cores of this call, 1 on a cluster: there a job has what its profile or set-threads says."""
    return workflow.resource_settings.cores or 1


def cell_prompts(wildcards):
    """Return the prompt file of a cell."""
    think = "-think" if wildcards.setting.endswith("-think") else ""
    return f"results/{config['suite']}/prompts/{wildcards.target}/{wildcards.dataset}{think}.jsonl"


@functools.cache
def files_of(folder):
    # none where a part is missing: a dry run lists its jobs all the same, and decode_cell stops by name
    return weight_files(Path(folder))


def cell_weights(wildcards):
    """Return the checkpoint files of the parts that a cell's method needs."""
    folders = cell_of(wildcards)["weights"].values()
    return [file for folder in folders for file in files_of(folder)]


def weights_check(wildcards):
    """Return the record of the weights' check where the suite pins them; it comes before everything that reads them."""
    return f"results/{config['suite']}/weights.json" if config["checkpoints"] else []


def pinned_weights(wildcards):
    """Return the files of the pinned parts; a missing part is named by the check itself."""
    return [
        file
        for part in config["checkpoints"]
        for file in weight_files(Path(config["weights"]) / part)
    ]


def refusal(wildcards):
    """Say why a cell's path names no cell of the suite."""
    parts = wildcards.path.split("/")
    shape = f"results/{config['suite']}/cells/{config['engine']}/{config['family']}/DATASET/VARIANT/SETTING/seedN"
    if (
        len(parts) != 6
        or parts[:2] != [config["engine"], config["family"]]
        or not parts[5].startswith("seed")
    ):
        raise WorkflowError(
            f"{wildcards.path} is not a cell of suite {config['suite']}; write it as {shape}"
        )
    _, _, dataset, variant, setting, seed = parts
    checked(suite.parse_variant, variant, config)
    checked(suite.parse_setting, setting)
    checked(
        suite.resolve_cell,
        config,
        dataset=dataset,
        variant=variant,
        setting=setting,
        seed=seed[4:],
    )
    raise WorkflowError(
        f"{wildcards.path} is not a cell of suite {config['suite']}; write it as {shape}"
    )


def think_flag(wildcards):
    return "--reasoning" if wildcards.think else ""


def tokenizer_file(wildcards):
    """Return the target's tokenizer.json; nothing where it is missing, so that a dry run lists its jobs."""
    path = Path(config["weights"]) / "target/tokenizer.json"
    return [str(path)] if path.exists() else []


def dataset_file(wildcards):
    """Return the file of a local or embedded prompt set, which is an input; hub sets are pinned by their revision."""
    if config["source"] == "hub":
        return []
    if config["source"] == "embedded":
        return f"tfm/data/{wildcards.dataset}.jsonl"
    return str(Path(config["data"]) / suite.pins()["local"][wildcards.dataset]["file"])


def dataset_pin(wildcards):
    """Return the pin of a prompt set as JSON: a changed pin makes its prompts again, and those of no other set."""
    return json.dumps(suite.pins()[config["source"]][wildcards.dataset], sort_keys=True)


def all_of_cells(*names):
    """Return these files of every cell of the suite."""
    return [f"{cell['path']}/{name}" for cell in CELLS for name in names]


def prompt_manifests(*forms):
    """Return the manifests, or the files of these forms, of all prompt sets that cells read."""
    names = {(cell["dataset"], "-think" if cell["reasoning"] else "") for cell in CELLS}
    head = f"results/{config['suite']}/prompts/{config['family']}"
    return [
        f"{head}/{dataset}{think}.{form}"
        for dataset, think in sorted(names)
        for form in forms or ["manifest.json"]
    ]


def lost_files():
    """Return files of a finished suite or cell that are gone: Snakemake makes a file that only others read, or that
    lies beside the one asked for, again only when it is asked for by name."""
    head = Path(f"results/{config['suite']}")
    files = all_of_cells(*CELL_FILES) + prompt_manifests("jsonl", "manifest.json")
    for names, folder, forms in [
        (config["tables"], "tables", TABLE_FORMS),
        (config["figures"], "figures", FIGURE_FORMS),
    ]:
        files += [f"{head}/{folder}/{name}.{form}" for name in names for form in forms]
    files += [
        f"{head}/{name}" for name in ("plan.json", "compare.md", "tables/captions.json")
    ]
    files += probe_files()
    finished = (head / "report.html").exists()
    return [
        file
        for file in files
        if not Path(file).exists()
        and (finished or Path(file).with_name("cell.json").exists())
    ]


def probe_json(probe):
    """Return the resolved settings of a probe as JSON; null where the suite does not run it."""
    wanted = probe in probes.planned(config)
    return json.dumps(
        probes.SETTINGS[probe](config) if wanted else None, sort_keys=True
    )


def probe_files():
    """Return the records of everything that the suite measures beside its cells."""
    names = [name for probe in probes.planned(config) for name in probes.FILES[probe]]
    return [f"results/{config['suite']}/{name}" for name in names]


def ceiling_cells(name):
    """Return one file of each ar cell whose answers give anchors."""
    wanted = "ceiling" in probes.planned(config)
    return (
        [f"{cell}/{name}" for cell in probes.ceiling(config)["cells"]] if wanted else []
    )


def ceiling_prompts():
    """Return the prompt files of those answers."""
    wanted = "ceiling" in probes.planned(config)
    return probes.ceiling(config)["prompts_files"] if wanted else []


def oracle_cells(name):
    """Return one file of each headline cell that is held against the best lossless tree."""
    wanted = "oracle" in probes.planned(config)
    return (
        [f"{cell}/{name}" for cell in probes.oracle(config)["cells"]] if wanted else []
    )


def oracle_prompts():
    """Return the prompt files of those cells."""
    wanted = "oracle" in probes.planned(config)
    return list(probes.oracle(config)["prompts_files"].values()) if wanted else []


def all_weights():
    """Return the files of target, drafter and weaver that are here."""
    return [
        file
        for part in probes.PARTS
        for file in weight_files(Path(config["weights"]) / part)
    ]


def traced_trees():
    """Return the recorded trees that the report shows."""
    return [f"{cell['path']}/trees.parquet" for cell in CELLS if cell["traced"]]


def bench_files():
    """Return the records of the kernels' bench where the suite asks for it."""
    head = f"results/{config['suite']}/bench"
    return [f"{head}/samples.json", f"{head}/summary.json"] if config["bench"] else []


def cuda_code(wildcards):
    """Return the digest of all kernels that the bench times."""
    backends = ("fused_cuda", "fused_triton", "recurrent_triton")
    return " ".join(
        source_digest(METHODS["ar"].factory, gdn_backend=name) for name in backends
    )


def published_files():
    """Return the published records, and the tables that are compared with what the records give."""
    return sorted(
        str(path)
        for form in ("json", "json.gz", "parquet", "csv")
        for path in Path("results/published").rglob(f"*.{form}")
    )


def config_json(wildcards):
    """Return the checked config as JSON; the folder of real sets is machine-bound and decides nothing after prompts."""
    return json.dumps(
        {**config, "data": "local" if config["data"] else None}, sort_keys=True
    )


def announce_progress():
    """Tell the cells' scripts how far the suite is; they print it."""
    done = sum(Path(file).exists() for file in all_of_cells("cell.json"))
    facts = {
        "cells": f"results/{config['suite']}/cells",
        "total": len(CELLS),
        "done": done,
        "start": time.time(),
    }
    os.environ.update(TFM_PROGRESS=json.dumps(facts))


onstart:
    announce_progress()
