# How the shipped weights are made. Nothing in `rule all` leads here: ask for `promote_weights`, or for one file.
# A stage that was stopped goes on from its state.pt; a call with --config device=cuda trains on a GPU.


rule train_tokenizer:
    input:
        config="workflows/config/train_{family}.yaml",
    output:
        corpus="results/train/{family}/text/corpus.npz",
        manifest="results/train/{family}/text/manifest.json",
        tokenizer="results/train/{family}/weights/target/tokenizer.json",
    log:
        "results/train/{family}/tokenizer.log",
    threads: all_cores
    params:
        data=(
            f"--data {shlex.quote(config['train_data'])}"
            if config.get("train_data")
            else ""
        ),
    shell:
        "{PYTHON} -m tfm.train.corpus --config {input.config} {params.data} --out results/train/{wildcards.family}"
        " > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


rule train_target:
    input:
        config="workflows/config/train_{family}.yaml",
        corpus=rules.train_tokenizer.output.corpus,
    output:
        weights="results/train/{family}/weights/target/model.safetensors",
        config="results/train/{family}/weights/target/config.json",
    log:
        "results/train/{family}/target.log",
    threads: all_cores
    resources:
        gpu=1,
    params:
        device=config["device"],
    shell:
        "{PYTHON} -m tfm.train.target --config {input.config} --out results/train/{wildcards.family}"
        " --device {params.device} > {log} 2>&1 || {{ tail -n 20 {log} >&2; exit 1; }}"


rule sample_text:
    input:
        config="workflows/config/train_{family}.yaml",
        corpus=rules.train_tokenizer.output.corpus,
        tokenizer=rules.train_tokenizer.output.tokenizer,
        target=rules.train_target.output.weights,
    output:
        samples="results/train/{family}/sample/samples.npz",
    log:
        "results/train/{family}/sample.log",
    threads: all_cores
    resources:
        gpu=1,
    params:
        device=config["device"],
    shell:
        "{PYTHON} -m tfm.train.sample --config {input.config} --out results/train/{wildcards.family}"
        " --device {params.device} > {log} 2>&1 || {{ tail -n 20 {log} >&2; exit 1; }}"


rule train_drafter:
    input:
        config="workflows/config/train_{family}.yaml",
        samples=rules.sample_text.output.samples,
        target=rules.train_target.output.weights,
    output:
        weights="results/train/{family}/weights/drafter/model.safetensors",
        config="results/train/{family}/weights/drafter/config.json",
    log:
        "results/train/{family}/drafter.log",
    threads: all_cores
    resources:
        gpu=1,
    params:
        device=config["device"],
    shell:
        "{PYTHON} -m tfm.train.drafter --config {input.config} --out results/train/{wildcards.family}"
        " --device {params.device} > {log} 2>&1 || {{ tail -n 20 {log} >&2; exit 1; }}"


rule train_weaver:
    input:
        config="workflows/config/train_{family}.yaml",
        samples=rules.sample_text.output.samples,
        target=rules.train_target.output.weights,
        drafter=rules.train_drafter.output.weights,
    output:
        weights="results/train/{family}/weights/weaver/model.safetensors",
        config="results/train/{family}/weights/weaver/config.json",
    log:
        "results/train/{family}/weaver.log",
    threads: all_cores
    resources:
        gpu=1,
    params:
        device=config["device"],
    shell:
        "{PYTHON} -m tfm.train.weaver --config {input.config} --out results/train/{wildcards.family}"
        " --device {params.device} > {log} 2>&1 || {{ tail -n 20 {log} >&2; exit 1; }}"


rule write_card:
    input:
        config="workflows/config/train_{family}.yaml",
        sources="workflows/config/datasets.yaml",
        text=rules.train_tokenizer.output.manifest,
        target=rules.train_target.output.weights,
        drafter=rules.train_drafter.output.weights,
        weaver=rules.train_weaver.output.weights,
    output:
        card="results/train/{family}/weights/README.md",
        facts="results/train/{family}/weights/facts.json",
    log:
        "results/train/{family}/export.log",
    shell:
        "{PYTHON} -m tfm.train.run --config {input.config} --out results/train/{wildcards.family} --stages export"
        " > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


# a target of its own: copies the trained family over the one that ships
rule promote_weights:
    input:
        card=f"results/train/{config['family']}/weights/README.md",
    log:
        f"results/train/{config['family']}/promote.log",
    params:
        family=config["family"],
    shell:
        "{PYTHON} -m tfm.train.export --from $(dirname {input.card}) --to tfm/weights/{params.family}"
        " > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"
