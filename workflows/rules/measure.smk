# What a suite measures beside its cells; the rules' settings come resolved, so that a changed value reruns them.


rule estimate_ceiling:
    input:
        script="workflows/scripts/estimate_ceiling.py",
        cells=ceiling_cells("cell.json"),
        answers=ceiling_cells("requests.parquet"),
        prompts=ceiling_prompts(),
        weights=ancient(all_weights()),
    output:
        anchors="<results>/ceiling/anchors.parquet",
        facts="<results>/ceiling/ceiling.json",
    log:
        "<results>/logs/estimate_ceiling.log",
    resources:
        gpu=GPUS,
    params:
        code=script_code("estimate_ceiling"),
        settings=probe_json("ceiling"),
    shell:
        "python {input.script} --settings {params.settings:q} --out $(dirname {output.facts}) > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


rule estimate_oracle:
    input:
        script="workflows/scripts/estimate_oracle.py",
        cells=oracle_cells("cell.json"),
        answers=oracle_cells("requests.parquet"),
        steps=oracle_cells("steps.parquet"),
        prompts=oracle_prompts(),
        weights=ancient(all_weights()),
    output:
        steps="<results>/oracle/steps.parquet",
        answers="<results>/oracle/answers.parquet",
        facts="<results>/oracle/oracle.json",
    log:
        "<results>/logs/estimate_oracle.log",
    resources:
        gpu=GPUS,
    params:
        code=script_code("estimate_oracle"),
        settings=probe_json("oracle"),
    shell:
        "python {input.script} --settings {params.settings:q} --out $(dirname {output.facts}) > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


# timed: runs alone
rule bench_kernel:
    input:
        script="workflows/scripts/bench_kernel.py",
    output:
        samples="<results>/kernels/samples.parquet",
        checks="<results>/kernels/checks.parquet",
        facts="<results>/kernels/kernels.json",
    log:
        "<results>/logs/bench_kernel.log",
    threads: all_cores
    resources:
        gpu=GPUS,
    params:
        code=script_code("bench_kernel"),
        settings=probe_json("kernels"),
    shell:
        "python {input.script} --settings {params.settings:q} --out $(dirname {output.facts}) > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


rule check_definitions:
    input:
        script="workflows/scripts/check_definitions.py",
    output:
        "<results>/definitions/definitions.json",
    log:
        "<results>/logs/check_definitions.log",
    params:
        code=script_code("check_definitions"),
        settings=probe_json("definitions"),
    shell:
        "python {input.script} --settings {params.settings:q} --out $(dirname {output}) > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"
