"""The words of a refusal: key, value, allowed values, remedy."""

import difflib


def refusal(key: str, value, allowed, remedy: str) -> str:
    names = ", ".join(map(str, allowed))
    return f"{key}: {shown(value)} is not allowed (allowed: {names}); {did_you_mean(value, allowed)}{remedy}"


def shown(value) -> str:
    return "null" if value is None else repr(value)


def did_you_mean(value, allowed) -> str:
    names = {str(name).lower(): str(name) for name in allowed}
    close = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.5)
    return f"did you mean {names[close[0]]}? " if close else ""


def one_of(key: str, value: str, allowed) -> None:
    if value not in allowed:
        raise ValueError(refusal(key, value, allowed, f"choose one of the allowed values for {key}"))
