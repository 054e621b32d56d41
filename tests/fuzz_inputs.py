"""Inputs that a fuzzed parser is fed: bytes that are damaged, and JSON with other values, keys and none."""

import copy
import json

from hypothesis import strategies as st

INTERESTING = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"{",
    b"}",
    b"[",
    b'"',
    b"\n",
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"\xed\xa0\x80",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged(draw, whole: bytes, span: int | None = None) -> bytes:
    """Draw `whole` with up to four changes in its first `span` bytes: flips, cuts, repeats, insertions."""
    data, span = bytearray(whole), min(span or len(whole), len(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, span - 1)))
        what = draw(st.sampled_from(["flip", "cut", "drop", "repeat", "insert", "tail"]))
        size = draw(st.integers(1, 64))
        if what == "flip" and data:
            data[min(at, len(data) - 1)] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del data[at:]
        elif what == "drop":
            del data[at : at + size]
        elif what == "repeat":
            data[at:at] = data[at : at + size]
        elif what == "insert":
            data[at:at] = draw(st.sampled_from(INTERESTING) | st.binary(max_size=8))
        else:
            data += draw(st.sampled_from(INTERESTING))
    return bytes(data)


@st.composite
def replaced(draw, whole: dict) -> dict:
    """Draw a JSON object with up to three values, at any depth, replaced, removed or added."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.integers(0, 4)):
                place[key] = draw(VALUES)
            elif isinstance(place, dict):
                del place[key]
            break
        if isinstance(place, dict) and not draw(st.integers(0, 5)):
            place[draw(st.text(max_size=8))] = draw(VALUES)
    return value


def as_json(objects):
    return objects.map(lambda value: json.dumps(value).encode())
