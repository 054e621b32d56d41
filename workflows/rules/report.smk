# From records to tables, figures and the report page. Nothing here needs a model or a GPU.


localrules:
    check,
    bless,
    rebuild_published,
    make_paper,
    write_plan,
    make_tables,
    make_figures,
    compare_paper,
    write_manifest,
    make_report,


rule write_plan:
    input:
        script="workflows/scripts/write_plan.py",
    output:
        "<results>/plan.json",
    log:
        "<results>/logs/write_plan.log",
    params:
        code=script_code("write_plan"),
        config=config_json,
        weights=json.dumps(DIGESTS, sort_keys=True),
    shell:
        "python {input.script} --config {params.config:q} --out {output} > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


rule make_tables:
    input:
        script="workflows/scripts/make_tables.py",
        # the paper's kernel times stand beside ours
        expected="workflows/config/expected.yaml",
        plan="<results>/plan.json",
        cells=all_of_cells("cell.json"),
        probes=probe_files(),
        prompts=prompt_manifests(),
    output:
        tables=report(
            collect("<results>/tables/{table}.csv", table=config["tables"]),
            category="Tables",
        ),
        forms=collect(
            "<results>/tables/{table}.{form}",
            table=config["tables"],
            form=TABLE_FORMS[1:],
        ),
        captions="<results>/tables/captions.json",
        summary="<results>/summary.json",
    log:
        "<results>/logs/make_tables.log",
    params:
        code=script_code("make_tables"),
    shell:
        "python {input.script} --plan {input.plan} --out $(dirname {output.summary}) > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


rule make_figures:
    input:
        script="workflows/scripts/make_figures.py",
        tables=collect("<results>/tables/{table}.csv", table=config["tables"]),
        captions="<results>/tables/captions.json",
    output:
        figures=report(
            collect("<results>/figures/{figure}.svg", figure=config["figures"]),
            category="Figures",
        ),
        forms=collect(
            "<results>/figures/{figure}.{form}",
            figure=config["figures"],
            form=FIGURE_FORMS[1:],
        ),
    log:
        "<results>/logs/make_figures.log",
    params:
        code=script_code("make_figures"),
        figures=" ".join(config["figures"]),
    shell:
        "python {input.script} --tables $(dirname {input.captions}) --out $(dirname {input.captions})/../figures"
        " --figures {params.figures} > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


rule compare_paper:
    input:
        script="workflows/scripts/compare_paper.py",
        expected="workflows/config/expected.yaml",
        summary="<results>/summary.json",
    output:
        csv="<results>/compare.csv",
        md="<results>/compare.md",
    log:
        "<results>/logs/compare_paper.log",
    params:
        code=script_code("compare_paper"),
    shell:
        "python {input.script} --expected {input.expected} --summary {input.summary} --out {output.csv} > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


rule write_manifest:
    input:
        script="workflows/scripts/write_manifest.py",
        plan="<results>/plan.json",
        cells=all_of_cells("cell.json"),
        # by their paths: beside rules.NAME.output Snakemake hashes all cells once for each of them
        tables=collect(
            "<results>/tables/{table}.{form}",
            table=config["tables"],
            form=TABLE_FORMS,
        ),
        facts=["<results>/tables/captions.json", "<results>/summary.json"],
        figures=collect(
            "<results>/figures/{figure}.{form}",
            figure=config["figures"],
            form=FIGURE_FORMS,
        ),
        compare="<results>/compare.csv",
    output:
        "<results>/manifest.json",
    log:
        "<results>/logs/write_manifest.log",
    params:
        code=script_code("write_manifest"),
    shell:
        "python {input.script} --plan {input.plan} --out {output} > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


rule make_report:
    input:
        script="workflows/scripts/make_report.py",
        viewer="workflows/scripts/tree_viewer.js",
        manifest="<results>/manifest.json",
        plan="<results>/plan.json",
        trees=traced_trees(),
    output:
        "<results>/report.html",
    log:
        "<results>/logs/make_report.log",
    params:
        code=script_code("make_report"),
    shell:
        "python {input.script} --plan {input.plan} --manifest {input.manifest} --out {output} > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


# tables as a paper prints them; the figures' pdf files lie beside
rule make_paper:
    input:
        script="workflows/scripts/make_paper.py",
        plan="<results>/plan.json",
        tables=collect("<results>/tables/{table}.csv", table=config["tables"]),
    output:
        directory("<results>/paper"),
    log:
        "<results>/logs/make_paper.log",
    params:
        code=script_code("make_paper"),
    shell:
        "python {input.script} --plan {input.plan} --tables $(dirname {input.plan})/tables --out {output} > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


# the kernels' own bench, where the suite asks for it: CUDA graphs of every arm, in turn
rule bench_graphs:
    input:
        script="results/published/kernels-h200/bench.py",
    output:
        samples="<results>/bench/samples.json",
        summary="<results>/bench/summary.json",
    log:
        "<results>/logs/bench_graphs.log",
    threads: all_cores
    resources:
        gpu=1,
    params:
        code=cuda_code,
    shell:
        "python {input.script} --out $(dirname {output.samples}) --commit $(git rev-parse HEAD) > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"


# fails by name when a run is not what expected.yaml and the last published run say; its two reports are kept then too
rule check:
    input:
        script="workflows/scripts/check.py",
        expected="workflows/config/expected.yaml",
        plan="<results>/plan.json",
        summary="<results>/summary.json",
        cells=all_of_cells("cell.json"),
        bench=bench_files(),
        published=published_files(),
    output:
        touch("<results>/check/passed"),
    log:
        junit="<results>/check/junit.xml",
        summary="<results>/check/summary.md",
    params:
        code=script_code("check"),
        bench="--bench $(dirname {})".format(bench_files()[0]) if bench_files() else "",
    shell:
        "python {input.script} --plan {input.plan} --expected {input.expected} --published results/published"
        " {params.bench} --out $(dirname {log.junit})"


# what expected.yaml would say after this run; nothing but the proposal is written
rule bless:
    input:
        script="workflows/scripts/bless.py",
        expected="workflows/config/expected.yaml",
        plan="<results>/plan.json",
        summary="<results>/summary.json",
        cells=all_of_cells("cell.json"),
    output:
        "<results>/check/proposed.yaml",
    log:
        "<results>/logs/bless.log",
    params:
        code=script_code("bless"),
    shell:
        "python {input.script} --plan {input.plan} --expected {input.expected} --out {output} 2>&1 | tee {log} >&2"


# every table and figure of every published run again from its records, and the csv files compared byte by byte
rule rebuild_published:
    input:
        script="workflows/scripts/rebuild_published.py",
        expected="workflows/config/expected.yaml",
        records=published_files(),
    output:
        "results/rebuilt/rebuilt.json",
    log:
        "results/rebuilt/rebuild.log",
    threads: 4
    params:
        code=script_code("rebuild_published"),
    shell:
        "python {input.script} --published results/published --expected {input.expected} --out $(dirname {output})"
        " --processes {threads} > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


# not part of rule all: copies the finished suite's records, tables and figures into the tracked tree
rule publish:
    input:
        script="workflows/scripts/publish.py",
        inventory="workflows/scripts/inventory.py",
        expected="workflows/config/expected.yaml",
        report="<results>/report.html",
        plan="<results>/plan.json",
    output:
        touch("<results>/published.done"),
    log:
        "<results>/logs/publish.log",
    params:
        name=config["suite"].removesuffix("-real"),
    shell:
        "{{ python {input.script} --plan {input.plan} --out results/published/{params.name}"
        " && python {input.inventory} --expected {input.expected} --published results/published --out results/published;"
        " }} > {log} 2>&1"
        " || {{ cat {log} >&2; exit 1; }}"
