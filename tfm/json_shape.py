"""What is wrong with a JSON value, by key, value and what is allowed; objects read from files with that check."""

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
WORDS |= {dict: "an object", list: "a list"}
NUMBER = (int, float)
SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Each:
    """The shape of an object whose values all have one shape, whatever its keys."""

    shape: object


@dataclass(frozen=True)
class OneOf:
    """The shape of a text that is one of some names."""

    names: tuple[str, ...]


def problem_of(value, shape, key: str = "") -> str | None:
    """Return the first thing in which a JSON value is not of a shape, as "key: value is not allowed (allowed: ..)".

    A shape is a type, a tuple of types (None stands for null), `OneOf`, a list of one shape (a list of such values),
    `Each`, or a dict: an object with at least these keys, of which one that ends in ? may be missing. None for no
    problem.
    """
    if isinstance(shape, dict):
        return _refused(value, (dict,), key) or _first(
            problem_of(value[name], one, _below(key, name)) if name in value else _missing(name, text, key)
            for text, one in shape.items()
            for name in [text.removesuffix("?")]
        )
    if isinstance(shape, Each):
        return _refused(value, (dict,), key) or _first(
            problem_of(one, shape.shape, _below(key, name)) for name, one in value.items()
        )
    if isinstance(shape, list):
        return _refused(value, (list,), key) or _first(
            problem_of(one, shape[0], f"{key}[{number}]") for number, one in enumerate(value)
        )
    if isinstance(shape, OneOf):
        is_one = isinstance(value, str) and value in shape.names
        return None if is_one else _sentence(value, ", ".join(shape.names), key)
    return _refused(value, shape if isinstance(shape, tuple) else (shape,), key)


def read_object(path: Path, shape: dict | Each, *, remedy: str, parse: Callable[[bytes], object] = json.loads) -> dict:
    """Return the object of a JSON file (.json, or compressed .json.gz) that has a shape.

    `parse` reads another format, and raises ValueError for what is none. Raises ValueError naming file, key, value and
    remedy for a file that is missing, damaged or of another shape.
    """
    try:
        data = Path(path).read_bytes()
        found = parse(gzip.decompress(data) if Path(path).suffix == ".gz" else data)
    except FileNotFoundError:
        problem = " is missing"
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError) as error:
        problem = f" is damaged ({error})"
    except OSError as error:  # a folder in its place
        problem = f" cannot be read ({error.strerror})"
    else:
        problem = problem_of(found, shape)
        if problem is None:
            return found
        problem = f": {problem}"
    raise ValueError(f"{path}{problem}; {remedy}")


def _refused(value, types: tuple, key: str) -> str | None:
    types = tuple(type(None) if one is None else one for one in types)
    # Python's true is an integer too, JSON's is not
    fits = bool in types if isinstance(value, bool) else isinstance(value, types)
    if fits:
        return None
    # every integer is a number
    names = [WORDS[one] for one in types if one is not int or float not in types]
    return _sentence(value, " or ".join(names), key)


def _sentence(value, allowed: str, key: str) -> str:
    return f"{f'{key}: ' if key else ''}{_shown(value)} is not allowed (allowed: {allowed})"


def _missing(name: str, text: str, key: str) -> str | None:
    return None if text.endswith("?") else f"{_below(key, name)}: missing key"


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _first(problems) -> str | None:
    return next(filter(None, problems), None)


def _shown(value) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
