"""Bad input of a script: one line on standard error that says what is wrong, and exit status 2. Needs no package."""

import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def told(main: Callable[..., int]) -> Callable[..., int]:
    """Return a script's `main` that says in one line what is wrong with its input, and then returns 2.

    Of a ValueError that another package raised the line also names where in this project it came up, since it may be a
    fault of ours.
    """

    @functools.wraps(main)
    def call(*arguments, **named) -> int:
        try:
            return main(*arguments, **named)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError):
                what = f"{error.filename}: {error.strerror}" if error.filename else error
            else:
                what = f"{error}{_place(error)}"
            print(f"{Path(main.__code__.co_filename).stem}: {what}", file=sys.stderr)
            return 2

    return call


def json_argument(option: str, text: str, *keys: str) -> dict:
    """Return the JSON object that an option's value is; raises ValueError naming the option, and what it lacks."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option}: {text[:40]!r} is not JSON ({error}); give a JSON object") from error
    if not isinstance(found, dict):
        raise ValueError(f"{option}: {text[:40]!r} is not allowed (allowed: a JSON object)")
    if lacking := [key for key in keys if key not in found]:
        raise ValueError(f"{option}: lacks {', '.join(lacking)}; add what is missing")
    return found


def _place(error: ValueError) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if _is_own(frames[-1].filename):
        return ""
    own = next((frame for frame in reversed(frames) if _is_own(frame.filename)), frames[-1])
    return f" (at {Path(own.filename).name}:{own.lineno})"


def _is_own(file: str) -> bool:
    path = Path(file).resolve()
    return not file.startswith("<") and path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts
