"""`tfm generate`: text that is never taken back, trees that show the path, refusals before any model loads."""

import functools
import re
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from workflow_runs import ROOT, write_tiny_family

from baselines import cli
from baselines.commands import generate
from baselines.generation import Detokeniser
from baselines.terminal import ASCII, Glyphs, visible
from baselines.tree_view import Node, TreeView, choose, draw, hidden_below, probability
from tfm import checkpoints
from tfm.tokenizer import load_tokenizer

PROMPT = "How many primes are below 30?"
NANO = ROOT / "tfm/weights/nano"


@pytest.fixture(autouse=True)
def gradients_stay_on():
    """A command decodes without gradients for the rest of its process, which here is every test's."""
    yield
    torch.set_grad_enabled(True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family"))


def run(capsys, *words, expect=0):
    """The exit status, standard output and standard error of `tfm generate`."""
    capsys.readouterr()
    try:
        status = cli.main(["generate", *map(str, words)])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert status == expect, err
    return out, err


# --- text


def test_every_method_streams_the_same_text(capsys):
    """One seed, one answer: the noise of a token is a function of seed, prompt and position."""
    texts = {}
    for method in ("ar", "dflash", "ddtree", "dartree", "tfm"):
        texts[method], err = run(capsys, PROMPT, "--method", method, "--max-new-tokens", 12)
        assert re.search(r"^12 tokens \(the cap\), \d+ steps, tau \d\.\d\d, \d+ tok/s on .+, 1 thread$", err, re.M)
    assert set(texts.values()) == {texts["ar"]} and texts["ar"].strip()


def test_reasoning_temperature_and_seed_change_the_answer(capsys):
    texts = [
        run(capsys, PROMPT, "--max-new-tokens", 12, *more)[0]
        for more in ([], ["--seed", 1], ["--reasoning"], ["--temperature", 0])
    ]
    assert len(set(texts)) == 4


def test_a_prompt_is_read_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(f"{PROMPT}\n".encode()), encoding="utf-8"))
    assert run(capsys, "-", "--max-new-tokens", 5)[0] == run(capsys, PROMPT, "--max-new-tokens", 5)[0]


@functools.cache
def load_nano():
    return load_tokenizer(NANO / "target")


@pytest.mark.parametrize("text", ["naïve", "日本語 and 한국어", "👩‍👩‍👧 e\u0301", "\u202eabc", "�x�", "a\x1b[31m"])
def test_streamed_pieces_are_never_taken_back_and_never_half_a_character(text):
    tokenizer = load_nano()
    tokens = tokenizer.encode(text)
    stream, pieces = Detokeniser(tokenizer.decode), []
    for count in range(1, len(tokens) + 1):
        pieces.append(stream.feed(tokens[:count]))
        assert text.startswith("".join(pieces))
    pieces.append(stream.feed(tokens, final=True))
    assert "".join(pieces) == text


@given(st.lists(st.integers(6, 2047), max_size=12), st.integers(1, 40))
def test_pieces_join_to_the_whole_text_whatever_the_tokens(tokens, repeats):
    """The window that is decoded again moves on, also through bytes that are no text."""
    tokenizer = load_nano()
    tokens = (tokens * repeats)[:200]
    stream = Detokeniser(tokenizer.decode)
    pieces = [stream.feed(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert "".join([*pieces, stream.feed(tokens, final=True)]) == tokenizer.decode(tokens)


def test_a_character_that_stays_half_is_shown_at_the_end():
    tokenizer = load_nano()
    half = tokenizer.encode("日")[:-1]
    stream = Detokeniser(tokenizer.decode)
    assert stream.feed(half) == "" and stream.feed(half, final=True) == "\ufffd"


def test_a_broken_byte_does_not_hold_back_what_follows():
    pieces = {1: b"\xe2", 2: b"\xff", 3: b"a", 4: b"\xe6\x97", 5: b"\xa5"}
    stream = Detokeniser(lambda tokens: b"".join(pieces[token] for token in tokens).decode(errors="replace"))
    assert [stream.feed(list(range(1, n + 1))) for n in (1, 2, 3, 4, 5)] == ["", "\ufffd", "\ufffda", "", "日"]


# --- trees


def make_view(depth=15, branching=3, accepted=4, token=" tok"):
    """A path of `depth` with siblings at every level; the path is accepted up to `accepted`."""
    columns = ("drafter", "weaver", "target")
    nodes, above = [Node("root", -1, 0, 0.0, dict.fromkeys(columns), True)], 0
    for level in range(1, depth + 1):
        for rank in range(branching):
            score = nodes[above].score - 0.1 - rank
            chances = {"drafter": None, "weaver": 0.5, "target": 0.004}
            nodes.append(Node(f"{token}{level}", above, level, score, chances, rank == 0 and level <= accepted))
        above = len(nodes) - branching
    return TreeView(0, nodes, columns, " bonus!", 0.25, " x", 1.5)


@pytest.mark.parametrize("rows", [1, 6, 24, 100])
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("accepted", [0, 4, 15])
def test_a_drawn_tree_fits_shows_the_path_and_counts_what_is_hidden(rows, width, accepted):
    view = make_view(accepted=accepted, token="\t" + "long " * 8)
    drawn = choose(view, rows)
    assert set(view.path) <= drawn and len(drawn) <= max(rows, len(view.path))
    assert all(view.nodes[index].parent in drawn for index in drawn - {0})
    assert sum(hidden_below(view, drawn).values()) == len(view.nodes) - len(drawn)
    lines = [line.plain for line in draw(view, rows=rows, width=width, glyphs=Glyphs())]
    assert max(map(cell_len, lines)) <= width
    assert sum("●" in line for line in lines) == accepted + 1 and sum("★" in line for line in lines) == 1
    assert len(lines) == len(drawn) + 4 and "\t" not in "".join(lines)
    if len(drawn) < len(view.nodes):
        assert f"{len(view.nodes) - len(drawn)} of {len(view.nodes) - 1} drafts not drawn" in lines[-1]


def test_the_best_siblings_of_the_path_are_drawn_first():
    view = make_view(depth=6, accepted=3)
    drawn = choose(view, len(view.path) + 4)
    best = set()
    for above in view.path:
        siblings = [index for index, node in enumerate(view.nodes) if node.parent == above and not node.accepted]
        best.add(max(siblings, key=lambda index: view.nodes[index].score))
    assert drawn == set(view.path) | best


def test_a_tree_is_drawn_in_ascii_where_the_terminal_has_no_more():
    assert all(line.plain.isascii() for line in draw(make_view(), rows=24, width=80, glyphs=ASCII))


def test_what_a_terminal_would_obey_is_escaped():
    assert visible("a\x1b[31m\u202e\r\u2028é日 ") == "a\\x1b[31m\\u202e\\r\\u2028é日 "


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1.00"), (0.62, "0.62"), (0.0041, ".0041"), (3e-5, "<1e-4"), (None, "")]
)
def test_probabilities_keep_their_column(value, text):
    assert probability(value) == text


def test_shown_trees_agree_with_the_answer(capsys):
    """Every step's emitted tokens are the path's and the bonus, and together they are the text."""
    out, _ = run(capsys, PROMPT, "--show-tree", "--max-new-tokens", 16, "--temperature", 0)
    emitted = "".join(eval(word) for word in re.findall(r'^(?:prefill )?emits (".*?")(?:  .*)?$', out, re.M))
    assert out.endswith(f"\n{emitted}\n")
    steps = out.split("── step ")[1:]
    for step in steps:
        accepted = int(re.search(r"(\d+) accepted \+ bonus", step)[1])
        assert len(re.findall("●", step)) == accepted + 1 and len(re.findall("★", step)) == 1
        assert "drafter   weaver   target" in step


@pytest.mark.parametrize(("method", "columns"), [("ar", ["target"]), ("ddtree", ["drafter", "target"])])
def test_a_tree_has_the_columns_of_its_method(capsys, method, columns):
    out, _ = run(capsys, PROMPT, "--show-tree", "--method", method, "--max-new-tokens", 4)
    assert columns in [line.split() for line in out.splitlines()]


# --- figures


def test_two_methods_are_compared_token_by_token(capsys):
    out, _ = run(capsys, PROMPT, "--compare", "ar", "--max-new-tokens", 12, "--budget", 8, "--stats")
    rows = [line.split("\t") for line in out.splitlines()]
    assert ["method", "tokens", "steps", "tau", "accepted a step", "tok/s"] in rows
    assert next(row for row in rows if row[0] == "ar")[1:5] == ["12", "11", "1.00", "0.00"]
    assert "tfm and ar emit the same 12 tokens" in out
    counts = [row for row in rows if len(row) == 2 and row[0].isdigit()]
    steps = int(next(row for row in rows if row[0] == "tfm")[2])
    assert sum(int(count) for _, count in counts) == steps
    assert {"draft", "build", "verify", "accept", "commit", "other"} <= {row[0] for row in rows}


def test_a_comparison_that_fails_says_where_and_exits_1(capsys, monkeypatch):
    from baselines import generation

    decode_job = generation.decode_job

    def spoiled(job, *arguments, **named):
        answer = decode_job(job, *arguments, **named)
        if job.config.method == "ar":
            answer.trace.output_tokens[3] = 0
        return answer

    monkeypatch.setattr(generation, "decode_job", spoiled)
    out, _ = run(capsys, PROMPT, "--compare", "ar", "--max-new-tokens", 6, expect=1)
    assert 'tfm and ar differ from token 3: "' in out and '"<|endoftext|>"' in out


@pytest.mark.parametrize("method", ["tfm", "ar"])
def test_an_answer_of_one_token_has_no_tau(capsys, method):
    out, err = run(capsys, PROMPT, "--method", method, "--max-new-tokens", 1, "--stats")
    assert "1 tokens (the cap), 0 steps, tau -" in err and "no step" in out


def test_an_answer_ends_where_a_cells_would(tmp_path, tiny):
    """The model's own ends (generation_config.json) count, as they do in a cell and in servers."""
    for part in ("drafter", "weaver"):
        (tmp_path / part).symlink_to(tiny / part)
    shutil.copytree(tiny / "target", tmp_path / "target")
    (tmp_path / "target/generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    options = cli.parse(["generate", PROMPT, "--weights", str(tmp_path)])[0]
    ends = generate.check_job(options, "tfm", PROMPT).config.eos_tokens
    assert ends == (load_tokenizer(tiny / "target").eos_id, 7, 9)


# --- refusals

REFUSED = [
    pytest.param([""], "prompt: '' is empty", id="empty_prompt"),
    pytest.param(["  \n"], "is empty (allowed: some text)", id="blank_prompt"),
    pytest.param(["word " * 3000], "the context of nano); shorten the prompt", id="prompt_longer_than_the_context"),
    pytest.param([PROMPT, "--max-new-tokens", "2048"], "+ 2048 new ones are not allowed (allowed: 2048", id="cap"),
    pytest.param([PROMPT, "--max-new-tokens", "0"], "max_new_tokens: 0 is not allowed", id="no_tokens"),
    pytest.param([PROMPT, "--method", "dtree"], "did you mean ddtree?", id="unknown_method"),
    pytest.param([PROMPT, "--compare", "arr"], "method: 'arr' is not allowed", id="unknown_second_method"),
    pytest.param([PROMPT, "--family", "nono"], "did you mean nano?", id="unknown_family"),
    pytest.param([PROMPT, "--weights", "nowhere"], "has no target/config.json", id="no_weights"),
    pytest.param(
        [PROMPT, "--candidates", "2049"], "(allowed: 1 to 2048, the vocabulary of nano)", id="k_above_vocabulary"
    ),
    pytest.param([PROMPT, "--children", "65"], "children: 65 is not allowed (allowed: 1 to 64", id="children_above_k"),
    pytest.param([PROMPT, "--depth", "16"], "depth: 16 is not allowed (allowed: 1 to 15", id="depth_above_rows"),
    pytest.param([PROMPT, "--budget", "0"], "budget: 0 is not allowed", id="no_budget"),
    pytest.param([PROMPT, "--method", "ar", "--budget", "8"], "ar takes none, leave it out", id="budget_of_ar"),
    pytest.param([PROMPT, "--temperature", "-1"], "temperature: -1.0 is not allowed", id="temperature_below_0"),
    pytest.param([PROMPT, "--temperature", "nan"], "temperature: nan is not allowed", id="temperature_nan"),
    pytest.param([PROMPT, "--temperature", "hot"], "invalid float value: 'hot'", id="temperature_is_no_number"),
    pytest.param([PROMPT, "--seed", "-1"], "seed: -1 is not allowed", id="negative_seed"),
    pytest.param([PROMPT, "--device", "tpu"], "device: 'tpu' is not allowed", id="unknown_device"),
    pytest.param([PROMPT, "--threads", "0"], "threads: 0 is not allowed", id="no_threads"),
    pytest.param([PROMPT, "--threads", "100000"], "threads: 100000 is not allowed (allowed: 1 to 1024)", id="threads"),
    pytest.param([PROMPT, "--budget", "100000"], "budget: 100000 is not allowed (allowed: 1 to 16384)", id="budget"),
    pytest.param([PROMPT, "--seed", str(2**64)], "(allowed: an integer >= 0 and below 2**63)", id="seed"),
    pytest.param([PROMPT, "--buget", "8"], "unrecognised: --buget 8", id="unknown_option"),
    pytest.param(["hello", "there"], "unrecognised: there; a prompt of several words needs quotes", id="no_quotes"),
    pytest.param([], "the following arguments are required: prompt", id="no_prompt"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_bad_input_is_refused_in_one_line_before_a_model_loads(capsys, monkeypatch, words, message):
    for name in ("load_target", "load_drafter", "load_weaver"):
        monkeypatch.setattr(checkpoints, name, lambda *_, **__: pytest.fail("a model was loaded"))
    out, err = run(capsys, *words, expect=2)
    assert out == "" and message in err and err.startswith("tfm generate: ") and err.count("\n") == 1


def test_a_part_without_files_is_refused_by_name(capsys, tmp_path, tiny):
    for part in ("target", "drafter"):
        (tmp_path / part).symlink_to(tiny / part)
    _, err = run(capsys, PROMPT, "--weights", tmp_path, expect=2)
    assert "weaver holds no file, tfm needs the weaver" in err
    run(capsys, PROMPT, "--weights", tmp_path, "--method", "ddtree", "--max-new-tokens", 3)


def test_a_damaged_config_is_refused_by_name(capsys, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text('{"vocab_size": ')
    _, err = run(capsys, PROMPT, "--weights", tmp_path, expect=2)
    assert "target/config.json is no target's config" in err and err.count("\n") == 1


def test_refusals_do_not_wait_for_torch():
    code = "import sys; from baselines import cli; cli.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    call = [sys.executable, "-c", code, "generate", PROMPT, "--depth", "16"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "depth: 16" in done.stderr


def test_large_vocabularies_get_the_paper_s_candidates(tiny):
    options = cli.parse(["generate", PROMPT])[0]
    tokenizer = load_tokenizer(tiny / "target")
    for vocabulary, expected in ((2048, 64), (151_936, 512)):
        sizes = {"vocab_size": vocabulary, "max_position_embeddings": 2048}
        assert generate.decode_config(options, "tfm", sizes, tokenizer).candidates == expected


def test_the_whole_vocabulary_may_be_candidates(capsys, tiny):
    run(capsys, PROMPT, "--weights", tiny, "--candidates", 2048, "--max-new-tokens", 3, "--show-tree")
