"""tests/CASES.md names a guard for every reported fault, and every test that it names is there."""

import ast
import re

import pytest
from workflow_runs import ROOT

TEXT = (ROOT / "tests/CASES.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| C")]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def defined_in(name: str) -> set[str]:
    """Return the tests that a file defines."""
    path = ROOT / "tests" / name
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_has_one_row():
    assert [row[0] for row in ROWS] == [f"C{number:03}" for number in range(1, 121)]
    assert all(len(row) == 4 and all(row) for row in ROWS)


@pytest.mark.parametrize("name", sorted({name for name, _ in NAMED.findall(TEXT)}))
def test_every_test_that_is_named_exists(name):
    named = {test for file, test in NAMED.findall(TEXT) if file == name}
    assert not named - defined_in(name)


def test_a_guard_is_tests_or_a_reason():
    """Nothing but names of tests, or a sentence that says why there is none."""
    for case, _, _, guard in ROWS:
        assert re.fullmatch(rf"({NAMED.pattern} ?)+", guard) or guard.startswith("no test: "), case
