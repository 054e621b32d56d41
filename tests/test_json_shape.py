"""What is wrong with a JSON value is said by key and value, and nothing is wrong with what has the shape."""

import gzip
import json

import pytest

from tfm.json_shape import NUMBER, Each, OneOf, problem_of, read_object

SHAPE = {
    "name": str,
    "n": int,
    "share": NUMBER,
    "on": bool,
    "top": (int, None),
    "of": Each(str),
    "kind": OneOf(("a", "b")),
}
SHAPE |= {"rows": [{"id": str, "note?": str}]}
WHOLE = {
    "name": "x",
    "n": 3,
    "share": 1,
    "on": False,
    "top": None,
    "of": {"p": "q"},
    "kind": "a",
    "rows": [{"id": "r"}],
}
WRONG = {
    "name": (3, "name: 3 is not allowed (allowed: text)"),
    "n": (3.0, "n: 3.0 is not allowed (allowed: an integer)"),
    "share": ("1", "share: '1' is not allowed (allowed: a number)"),
    "on": (1, "on: 1 is not allowed (allowed: true or false)"),
    "top": ("", "top: '' is not allowed (allowed: an integer or null)"),
    "of": ({"p": "q", "r": None}, "of.r: null is not allowed (allowed: text)"),
    "kind": ("c", "kind: 'c' is not allowed (allowed: a, b)"),
    "rows": ([{"id": "r"}, {"id": "s", "note": []}], "rows[1].note: [] is not allowed (allowed: text)"),
}


def test_a_value_of_the_shape_has_no_problem_and_more_keys_are_none():
    assert problem_of(WHOLE, SHAPE) is None
    assert problem_of({**WHOLE, "more": 1, "share": 0.5, "top": 3, "of": {}, "rows": []}, SHAPE) is None


@pytest.mark.parametrize("key", WRONG)
def test_a_problem_names_key_value_and_what_is_allowed(key):
    value, said = WRONG[key]
    assert problem_of({**WHOLE, key: value}, SHAPE) == said
    assert problem_of({name: value for name, value in WHOLE.items() if name != key}, SHAPE) == f"{key}: missing key"


@pytest.mark.parametrize("shape", [int, NUMBER, str, [int], Each(int), {"a": int}, OneOf(("true",))], ids=str)
def test_true_is_no_number_and_nothing_else_but_true_or_false(shape):
    assert problem_of(True, shape).startswith("True is not allowed (allowed: ")
    assert problem_of(True, (bool, int)) is None


def test_a_long_value_is_cut_short():
    assert len(problem_of({"a": "x" * 10_000}, {"a": int})) < 120


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(None, " is missing; mend it", id="none"),
        pytest.param(b"{", " is damaged (", id="cut"),
        pytest.param(b"\xff\xfe", " is damaged (", id="bytes"),
        pytest.param(b"[" * 100_000, " is damaged (", id="nested"),
        pytest.param(b"[]", ": [] is not allowed (allowed: an object); mend it", id="list"),
        pytest.param(b'{"a": "3"}', ": a: '3' is not allowed (allowed: an integer); mend it", id="type"),
    ],
)
@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_a_file_of_another_content_is_refused_by_name(tmp_path, name, data, said):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(ValueError) as caught:
        read_object(path, {"a": int}, remedy="mend it")
    assert str(caught.value).startswith(f"{path}{said}") and str(caught.value).endswith("; mend it")
    assert type(caught.value) is ValueError


def test_a_folder_in_a_files_place_is_refused_and_a_whole_file_is_read(tmp_path):
    with pytest.raises(ValueError, match="cannot be read .Is a directory.; mend it"):
        read_object(tmp_path, {}, remedy="mend it")
    (tmp_path / "x.json").write_text(json.dumps(WHOLE))
    assert read_object(tmp_path / "x.json", SHAPE, remedy="mend it") == WHOLE
