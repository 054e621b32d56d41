# From prompt sets to the records of every cell.


rule check_weights:
    input:
        script="workflows/scripts/check_weights.py",
        weights=pinned_weights,
    output:
        "<results>/weights.json",
    log:
        "<results>/logs/check_weights.log",
    params:
        weights=shlex.quote(config["weights"]),
        checkpoints=json.dumps(config["checkpoints"], sort_keys=True),
    shell:
        "python {input.script} --weights {params.weights} --checkpoints {params.checkpoints:q} --out {output}"
        " > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


rule prepare_prompts:
    input:
        source=dataset_file,
        pins=ancient("workflows/config/datasets.yaml"),
        tokenizer=ancient(tokenizer_file),
        weights=ancient(weights_check),
    output:
        prompts="<results>/prompts/{target}/{dataset}{think}.jsonl",
        manifest="<results>/prompts/{target}/{dataset}{think}.manifest.json",
    log:
        "<results>/prompts/{target}/{dataset}{think}.log",
    params:
        code=script_code("prepare_prompts"),
        pin=dataset_pin,
        target=shlex.quote(f"{config['weights']}/target"),
        source=config["source"],
        data=f"--data {shlex.quote(config['data'])}" if config["data"] else "",
        tokenizer_sha256=DIGESTS["target"],
        limit=f"--limit {config['prompts']}" if config["prompts"] else "",
        tokens=config["max_new_tokens"],
        context=config["context"],
        protocol=config["protocol"],
        think=think_flag,
    shell:
        "python workflows/scripts/prepare_prompts.py --dataset {wildcards.dataset} --source {params.source} {params.data}"
        " --pins {input.pins} --tokenizer {params.target} --target {wildcards.target} {params.limit}"
        " --max-new-tokens {params.tokens} --context {params.context} --protocol {params.protocol} {params.think}"
        " --out {output.prompts} --manifest {output.manifest} > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


rule decode_cell:
    input:
        prompts=cell_prompts,
        weights=ancient(cell_weights),
        check=ancient(weights_check),
    output:
        requests=ensure("<results>/cells/<cell>/requests.parquet", non_empty=True),
        steps=ensure("<results>/cells/<cell>/steps.parquet", non_empty=True),
        trees=ensure("<results>/cells/<cell>/trees.parquet", non_empty=True),
        manifest=ensure("<results>/cells/<cell>/cell.json", non_empty=True),
    log:
        "<results>/cells/<cell>/decode.log",
    threads: cell_threads
    resources:
        gpu=GPUS,
    params:
        cell=cell_json,
        source=cell_source,
    shell:
        "python workflows/scripts/decode_cell.py --cell {params.cell:q} --prompts {input.prompts}"
        " --out $(dirname {output.manifest}) --log {log} >> {log}"


# the same records, from a server of another environment
rule serve_cell:
    input:
        prompts=cell_prompts,
        weights=ancient(cell_weights),
        check=ancient(weights_check),
    output:
        requests=ensure("<results>/cells/<cell>/requests.parquet", non_empty=True),
        steps=ensure("<results>/cells/<cell>/steps.parquet", non_empty=True),
        trees=ensure("<results>/cells/<cell>/trees.parquet", non_empty=True),
        manifest=ensure("<results>/cells/<cell>/cell.json", non_empty=True),
    log:
        "<results>/cells/<cell>/decode.log",
    wildcard_constraints:
        engine=SERVED,
    threads: cell_threads
    resources:
        gpu=GPUS,
    params:
        cell=cell_json,
        source=cell_source,
    shell:
        "python workflows/scripts/serve_cell.py --cell {params.cell:q} --prompts {input.prompts} {SERVER}"
        " --out $(dirname {output.manifest}) --log {log} >> {log}"


ruleorder: serve_cell > decode_cell


# a path that names no cell gets a message instead of "no rule to produce"
rule refuse_cell:
    input:
        refusal,
    output:
        "<results>/cells/{path}/requests.parquet",
        "<results>/cells/{path}/steps.parquet",
        "<results>/cells/{path}/trees.parquet",
        "<results>/cells/{path}/cell.json",
    log:
        "<results>/cells/{path}/refused.log",
    wildcard_constraints:
        path=NO_CELL,
    shell:
        "false > {log}"
