import os

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

min_version("9.27")


if not os.path.samefile(workflow.basedir, os.getcwd()):
    raise WorkflowError(
        f"directory: {os.getcwd()} is not the repository, and all paths are relative to it;"
        f" call snakemake there, or add -d {workflow.basedir}"
    )


# a suite stands alone: --configfile replaces nano instead of being merged over it
if "suite" not in config:
    with open("workflows/config/nano.yaml") as nano:
        # Snakemake names no file for one without keys; for one that is no YAML it does
        if not any(line.strip() and line[0] != "#" for line in nano):
            raise WorkflowError(
                "workflows/config/nano.yaml is empty; restore it: git checkout workflows/config/nano.yaml"
            )

    configfile: "workflows/config/nano.yaml"


include: "workflows/rules/common.smk"


pathvars:
    results=f"results/{config['suite']}",
    cell="{engine}/{target}/{dataset}/{variant}/{setting}/seed{seed}",


include: "workflows/rules/cells.smk"
include: "workflows/rules/measure.smk"
include: "workflows/rules/report.smk"
include: "workflows/rules/train.smk"


# after the rules: Snakemake expands <cell> too late for constraints that stand before them
wildcard_constraints:
    engine=ENGINE,
    target=TARGET,
    dataset=DATASET,
    variant=VARIANT,
    setting=SETTING,
    think="(-think)?",
    seed=SEED,


rule all:
    default_target: True
    input:
        collect("<results>/tables/{table}.csv", table=config["tables"]),
        collect("<results>/figures/{figure}.pdf", figure=config["figures"]),
        "<results>/compare.csv",
        "<results>/summary.json",
        "<results>/manifest.json",
        "<results>/report.html",
        lost_files(),
