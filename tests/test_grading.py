"""Graders that guard against a method that loses answers, and the sandbox in which a model's code runs."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from workflow_runs import ROOT

from tfm import grading, sandbox
from tfm.prompts import PromptRow

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import grade_cells
from packing import read_packed

PROMPT = 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """ Sum of the numbers. """\n'
TEST = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 16 - 3 = 13 eggs, so $13 x 2 = $26.\n#### 26", 26),
        ("Thus the result is \\boxed{1,234}. Check: 2 + 2 = 4.", 1234),
        ("first \\boxed{3}, then corrected: \\boxed{4}", 4),
        ("The answer is **$1,080.50**, not 7.", 1080.5),
        ("answer: -3", -3),
        ("We get 3/4 of it", 0.75),
        ("it takes 12 days and 5 hours", 5),
        ("<think>maybe 9, \\boxed{9}</think>It is \\boxed{10}.", 10),
        ("no number at all", None),
        ("<think>still thinking about 5", None),
        ("\\boxed{x} which is 8", 8),
        ("a share of 1/0", None),
        (r"half of it: \boxed{\frac{3}{4}}. Not 2.", 0.75),
        (r"\boxed{\$1,080 \text{ in all}}, 3 times", 1080),
        ("The answer is \u22125", -5),
        ("maybe \\boxed{9}</think>\n\nSo 10.", 10),
    ],
)
def test_a_gsm8k_answer_is_its_marked_or_last_number(text, number):
    assert grading.gsm8k_answer(text) == (None if number is None else pytest.approx(number))


def test_the_reference_is_the_number_behind_the_mark():
    assert grading.gsm8k_is_right("so 18 in total", "9 * 2 = <<9*2=18>>18\n#### 18")
    assert grading.gsm8k_is_right("so 1,018.0 dollars", "#### 1018") and not grading.gsm8k_is_right("17", "#### 18")
    with pytest.raises(ValueError, match="reference: 'none' holds no number"):
        grading.gsm8k_is_right("18", "none")


ANSWERS = {
    "continued": ("    return sum(numbers)\n\n\nprint('more')\n", True),
    "not_indented": ("return sum(numbers)", True),
    "block": ("Sure:\n```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```\nDone.", True),
    "last_definition": (
        "```python\nx = 1\n```\n```\ndef total(n):\n    return sum(n)\n```\n```\ntotal([1])\n```",
        True,
    ),
    "wrong": ("    return len(numbers)", False),
    "no_code": ("I cannot do that.", False),
    "leaves_early": ("```python\nimport sys\nsys.exit(0)\ndef total(n): return 0\n```", False),
    "leaves_at_once": ("```python\nimport os\nos._exit(0)\ndef total(n): return 0\n```", False),
}


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == 2",
        "assert math.isclose(f(1), 2)",
        "assert not f(1) == 3",
        "assert (f(1)) == 2",
        "assert f (1) == 2",
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_block_that_defines_what_a_test_calls_is_the_program(test, newline):
    """An example behind the function was taken for it where the first assertion is no plain call."""
    answer = "```python\ndef f(x):\n    return x + 1\n```\nSo:\n```python\nf(1)\n```\n".replace("\n", newline)
    exec(grading.mbpp_program(answer, tests=[test], imports=["import math"]), {})


@pytest.fixture(scope="module")
def box():
    if sandbox.why_not():
        pytest.skip(f"no sandbox can be made here: {sandbox.why_not()}")
    return sandbox.run_python


@pytest.mark.parametrize("name", ANSWERS)
def test_a_humaneval_answer_passes_its_tests_or_not(box, name):
    answer, passes = ANSWERS[name]
    program = grading.humaneval_program(answer, prompt=PROMPT, entry_point="total", test=TEST)
    assert box(program).passed == passes


def test_an_mbpp_answer_is_run_with_its_assertions(box):
    tests = ["assert set(twice([1])) == {2}", "assert twice([]) == []"]
    right = "```python\ndef twice(values):\n    return [math.floor(2 * v) for v in values]\n```"
    assert box(grading.mbpp_program(right, tests=tests, imports=["import math"])).passed
    assert not box(grading.mbpp_program("def twice(values):\n    return values", tests=tests)).passed


HOSTILE = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=1)",
    "name_service": "import socket\nsocket.getaddrinfo('pypi.org', 443)",
    "reads_the_repository": f"open({str(ROOT / 'README.md')!r}).read()",
    "reads_accounts": "open('/etc/passwd').read()",
    "writes_the_interpreter": "import json\nopen(json.__file__, 'a').write('#')",
    "writes_the_system": "open('/usr/planted', 'w').write('x')",
    "mounts": "import subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', '/usr'], check=True)",
    "new_namespace": "import subprocess\nsubprocess.run(['unshare', '--mount', 'true'], check=True)",
    "large_file": "open('/tmp/big', 'wb').write(b'x' * (1 << 26))",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_the_sandbox_refuses(box, what):
    done = box(HOSTILE[what], seconds=3)
    assert not done.passed and done.reason in ("wrong", "time"), done
    assert "error" in done.output.lower() or done.reason == "time", done


def test_time_and_memory_have_limits_and_nothing_is_left(box):
    start = time.monotonic()
    mark = "sandboxed_program_that_never_ends"
    code = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: {mark} = 1'])\nwhile True: pass"
    )
    assert box(code, seconds=1).reason == "time" and time.monotonic() - start < 5
    assert box("x = [0] * (1 << 30)").reason == "memory"
    many = "import os, time\nfor _ in range(64):\n    if not os.fork():\n        time.sleep(99)"
    # root is exempt from the limit on processes, and from no other; they end with their program all the same
    assert box(f"{many}\n# {mark}").passed == (os.getuid() == 0)
    time.sleep(0.2)
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(p)]
    assert not alive


def _read(path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_where_no_sandbox_can_be_made_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not", lambda: "unshare: Operation not permitted")
    monkeypatch.setattr(sandbox, "_run", lambda *_, **__: pytest.fail("it was run"))
    with pytest.raises(ValueError, match="sandbox: cannot be made here .unshare: Operation not permitted"):
        sandbox.run_python("pass")


def requests(right: dict[str, list[bool]]) -> pd.DataFrame:
    rows = [
        {"dataset": "gsm8k", "setting": "t1", "variant": variant, "seed": 0, "id": str(i), "right": value}
        for variant, values in right.items()
        for i, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("right", "count", "words"),
    [(False, 60, "none of 60 right"), (True, 60, "all of 60 right"), (False, 50, ""), (None, 60, "")],
)
def test_no_answer_right_or_all_of_many_is_doubted(right, count, words):
    """SpecForge's HumanEval: an accuracy of 0.0 stood beside 164 valid rows."""  # C100
    answers = [bool(i % 7) if right is None else right for i in range(count)]
    flag = grade_cells.accuracy(requests({"ar": answers})).iloc[0]["flag"]
    assert (words in flag and "doubt the grader" in flag) if words else flag == ""


def test_answers_to_prompts_of_another_set_are_not_graded():
    with pytest.raises(ValueError, match="prompts: '.*' and 1 more are not in the set"):
        grade_cells.grade(requests({"ar": [True, False]}), {}, str)


def test_an_arm_that_loses_answers_is_flagged():
    """llama.cpp#27975: 93 % right became 62 % with drafts that were not verified, while the speed doubled."""
    base = [i % 8 != 0 for i in range(64)]
    lossy = [value and i % 3 != 0 for i, value in enumerate(base)]
    table = grade_cells.accuracy(requests({"ar": base, "tfm": base, "broken": lossy})).set_index("variant")
    assert table.loc["ar", "right"] == 0.875 and table.loc["tfm", "over_ar"] == 0
    assert table["flag"].to_dict() == {"ar": "", "tfm": "", "broken": "differs from ar"}


def test_answers_are_read_from_records_and_graded_once_each(monkeypatch):
    judged = []
    row = PromptRow("gsm8k/0", 0, "gsm8k", "math", ("?",), "", {"solution": "#### 4"})
    monkeypatch.setattr(grade_cells.grading, "gsm8k_is_right", lambda *words: judged.append(words) or words[0] == "4")
    frame = pd.DataFrame({"id": ["gsm8k/0"] * 3, "output_tokens": [[4], [4], [5]]})
    assert grade_cells.grade(frame, {row.id: row}, lambda tokens: str(tokens[0])).tolist() == [True, True, False]
    assert len(judged) == 2
    with pytest.raises(ValueError, match="gsm8k/0: has no solution or reference"):
        grade_cells.grader(PromptRow("gsm8k/0", 0, "gsm8k", "math", ("?",)))


def test_code_is_not_run_unless_asked_for(tmp_path):
    plan = read_packed(ROOT / "results/published/nano/plan.json.gz")
    plan["config"]["datasets"] = ["humaneval", "mtbench"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    options = {
        "plan": tmp_path / "plan.json",
        "records": None,
        "data": None,
        "tokenizer": None,
        "run_model_code": False,
    }
    with pytest.raises(ValueError, match="hold none that can be graded .*humaneval need --run-model-code"):
        grade_cells.run(argparse.Namespace(**options, out=tmp_path / "out.csv"))
