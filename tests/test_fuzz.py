"""No input crashes a parser, nothing of a config or prompt reaches a shell unquoted, and no checkpoint runs code."""

import re
import shlex
import subprocess

import campaign_fuzz
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from workflow_runs import NANO, ROOT, SLICE, checkout, snakemake

from baselines import suite
from baselines.serving import wire
from tfm.checkpoints import load_target

INPUTS = 40  # of each parser; tests/campaign_fuzz.py draws thousands
NAMES = sorted(campaign_fuzz.FILES) + sorted(campaign_fuzz.value_parsers())
NAMES += [
    f"{part} {name}"
    for part in ("target", "drafter", "weaver", "head")
    for name in ("config.json", "model.safetensors")
]
NAMES += ["generation_config.json", "tokenizer.json", "weaver.pth"]


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    return campaign_fuzz.parsers(tmp_path_factory.mktemp("fuzz"))


def test_every_parser_is_fuzzed(parsers):
    assert sorted(parsers) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_input_crashes_a_parser(parsers, name):
    counts, crashes = campaign_fuzz.fuzz(parsers[name], inputs=INPUTS, seed=1)
    assert not crashes and counts["inputs"] >= INPUTS / 2
    # damage of a side file is passed over, since a line more or less is one prompt decoded again
    assert counts["refused"] > 0 or name == "done.jsonl"


# what reaches a shell

SHELLS = [path.read_text() for path in [ROOT / "Snakefile", *sorted((ROOT / "workflows/rules").glob("*.smk"))]]
# values of wildcards and of keys with a pattern of their own: a shell has nothing to obey in them
PLAIN = re.compile(r"[A-Za-z0-9._/-]*")
PATTERNED = ("suite", "family", "engine", "protocol", "source", "device", "dtype", "datasets", "methods")


# inputs that lie in the repository or under results/<suite>
OURS = ["script", "pins", "plan", "expected", "summary", "manifest", "prompts", "captions", "config", "card"]
OURS += ["inventory"]


def commands() -> list[str]:
    """Return the text of every shell: block."""
    blocks = [block for text in SHELLS for block in re.findall(r"\n    shell:\n((?: {8}.*\n)+)", text)]
    return ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', block)) for block in blocks]


def test_every_placeholder_of_a_command_is_quoted_or_plain():
    """Free text is quoted where it enters a command (:q, shlex.quote); what is not quoted is a path or name of ours."""
    assert len(commands()) > 12
    texts = "\n".join(SHELLS)
    for command in commands():
        for placeholder in re.findall(r"(?<!\{)\{([a-z_.]+)(:q)?\}", command):
            name, quoted = placeholder
            kind, _, key = name.partition(".")
            if quoted or kind in ("log", "wildcards", "output", "threads"):
                continue
            if kind == "input":
                assert key in OURS, name
                continue
            values = re.findall(rf"^        {key}=(.*),$", texts, flags=re.MULTILINE)
            assert kind == "params" and values, name
            for value in values:
                assert is_safe(value), f"{name} = {value} reaches a shell unquoted"


def is_safe(value: str) -> bool:
    """Whether a parameter is quoted, a number, or of a key whose schema has a pattern."""
    key = re.search(r"config\[['\"](\w+)['\"]\]", value)
    if "shlex.quote(" in value or "think_flag" in value or "script_code" in value or key is None:
        return key is None or "shlex.quote(" in value
    properties = yaml.safe_load(suite.SCHEMA_FILE.read_text())["properties"]
    types = properties[key[1]].get("type")
    numeric = types and set([types] if isinstance(types, str) else types) <= {"integer", "number", "null", "boolean"}
    return bool(numeric) or key[1] in PATTERNED or key[1] == "figures"


@given(
    st.sampled_from(PATTERNED), st.text(max_size=12) | st.sampled_from(["a b", "$(id)", "x;y", "`id`", "a'b", "-rf"])
)
def test_a_key_that_reaches_a_shell_takes_plain_names_only(key, text):
    value = [text] if key in ("datasets", "methods") else text
    try:
        config = suite.resolve({**NANO, key: value})
    except ValueError:
        return
    found = config[key] if isinstance(config[key], list) else [config[key]]
    assert all(PLAIN.fullmatch(str(word)) and not str(word).startswith("-") for word in found)


@given(st.text(alphabet=st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=20))
def test_quoted_text_stays_one_word(text):
    """What shlex.quote and Snakemake's :q give a shell is the value and nothing else."""
    from snakemake.utils import format as snakemake_format

    command = snakemake_format("{value:q} {quoted}", value=text, quoted=shlex.quote(text))
    assert shlex.split(command) == [text, text]


def test_a_folder_that_spells_a_command_is_a_folder(tmp_path, tiny_weights):
    """Weights in a folder whose name a shell would obey: prompts are prepared from it, and nothing else happens."""
    folder = checkout(tmp_path / "copy", tiny_weights)
    name = "w'\"; touch planted; $(touch planted) `touch planted` &"
    (folder / name).symlink_to(tiny_weights)
    target = "results/nano/prompts/nano/sample-math.jsonl"
    text = snakemake(folder, target, config=[*SLICE, f"weights={name}"], expect=None)
    assert not list(tmp_path.rglob("planted"))
    assert (folder / target).exists() or "is not allowed" in text or "not found" in text, text[-1500:]


# code in checkpoints


def test_code_that_comes_with_a_checkpoint_is_never_asked_for():
    """No call trusts remote code, and no pickle is read but by torch's weights_only reader."""
    sources = {
        path: path.read_text() for name in ("tfm", "baselines", "workflows") for path in (ROOT / name).rglob("*.py")
    }
    for path, text in sources.items():
        assert not re.search(r"trust_remote_code\s*=\s*True|pickle\.loads?\(|joblib|np\.load\(.*allow_pickle", text), (
            path
        )
        for call in re.findall(r"torch\.load\([^\n]*", text):
            assert "weights_only=True" in call, f"{path}: {call}"


def test_a_config_that_names_code_runs_none(tmp_path, tiny_weights):
    """auto_map is how a checkpoint asks transformers to run a file of its own."""
    import json
    import shutil

    folder = tmp_path / "target"
    shutil.copytree(tiny_weights / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "planted.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "planted.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w').close()\n")
    try:
        load_target(folder)
    except ValueError as error:
        assert "auto_map" in str(error)
    assert not (tmp_path / "planted").exists()


def test_nothing_listens_beyond_this_machine():
    """Nothing here listens but a port that is looked for, and the engines' servers are launched on the loopback."""
    words = r"0\.0\.0\.0|\.bind\(|http\.server|listen\(|--host"
    call = ["grep", "-rnE", "--include=*.py", words, "tfm", "baselines", "workflows", "kernels"]
    lines = subprocess.run(call, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert lines and all("HOST, " in line for line in lines) and wire.HOST == "127.0.0.1", lines
