"""Pins of the prompt sets (workflows/config/datasets.yaml): reading them, and filling hub revisions for `tfm pin`."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from tfm.manifest import write_atomic

SOURCES = ("embedded", "local", "hub")


def load_pins(path: Path | str) -> dict:
    """Return the pins file as a dict with keys embedded, local, hub and training.

    Raises ValueError when the file is missing, is not YAML or lacks a section.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"pins: {str(path)!r} does not exist; give workflows/config/datasets.yaml")
    try:
        pins = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"pins: {str(path)!r} is not YAML ({error}); restore the file") from error
    missing = [source for source in SOURCES if not isinstance(pins, dict) or not pins.get(source)]
    if missing:
        raise ValueError(f"pins: {str(path)!r} lacks {', '.join(missing)}; restore the file")
    return pins


def dataset_names(pins: dict, source: str) -> list[str]:
    """Return the names that `source` offers, in file order."""
    if source not in SOURCES:
        raise ValueError(f"source: {source!r} is not allowed (allowed: {', '.join(SOURCES)}); choose one of them")
    return list(pins[source])


def check_dataset(pins: dict, source: str, name: str) -> dict:
    """Return the pin entry of `name`, or raise ValueError with the allowed names and where else it is offered."""
    allowed = dataset_names(pins, source)
    if name not in allowed:
        elsewhere = [other for other in SOURCES if name in pins[other]]
        remedy = (
            f"it is offered by source {' and '.join(elsewhere)}" if elsewhere else "choose one of the allowed names"
        )
        raise ValueError(
            f"dataset: {name!r} is not allowed for source {source} (allowed: {', '.join(allowed)}); {remedy}"
        )
    return pins[source][name]


def unpinned(pins: dict, names: Iterable[str] | None = None) -> list[str]:
    """Return the hub sets without a revision; of `names` if given. For the warning of a dry run."""
    names = list(pins["hub"]) if names is None else list(names)
    return [name for name in names if not check_dataset(pins, "hub", name).get("revision")]


def require_pinned(pins: dict, name: str) -> dict:
    """Return the hub entry of `name`, or raise ValueError when it has no revision."""
    entry = check_dataset(pins, "hub", name)
    if not entry.get("revision"):
        raise ValueError(
            f"revision: {name} is unpinned ({entry['repo']}, allowed: a commit); "
            "run `tfm pin` once where the hub can be reached and commit workflows/config/datasets.yaml"
        )
    return entry


def hub_revision(repo: str) -> str:
    """Return the newest commit of a data set on the hub (one API call)."""
    from huggingface_hub import HfApi  # slow to import, needed by `tfm pin` only

    return HfApi().dataset_info(repo).sha


def pin(
    path: Path | str,
    *,
    names: Iterable[str] | None = None,
    update: bool = False,
    resolve: Callable[[str], str] = hub_revision,
) -> dict[str, str]:
    """Fill the empty hub revisions of the pins file (with `update`, all that come from the hub); return the new ones.

    All revisions are resolved before anything is written, and the file is replaced in one move.
    Raises ValueError when the hub cannot be asked or does not answer with a commit.
    """
    path = Path(path)
    pins = load_pins(path)
    names = dataset_names(pins, "hub") if names is None else list(names)
    wanted = [name for name in names if update or name in unpinned(pins, [name])]
    # a set without `repo` (FastChat's file) is pinned by hand to the paper's commit
    repos = {name: pins["hub"][name]["repo"] for name in wanted if "repo" in check_dataset(pins, "hub", name)}
    revisions = {name: _resolved(name, repo, resolve) for name, repo in repos.items()}
    text = path.read_text(encoding="utf-8")
    for name, revision in revisions.items():
        text = _with_revision(text, name, revision)
    written = yaml.safe_load(text)
    wrong = [name for name, revision in revisions.items() if written["hub"][name]["revision"] != revision]
    assert not wrong, f"revisions of {wrong} did not reach the pins file"
    write_atomic(path, text.encode())
    return revisions


def _resolved(name: str, repo: str, resolve: Callable[[str], str]) -> str:
    try:
        revision = resolve(repo)
    except Exception as error:  # whatever the hub client raises, the pins file stays as it was
        raise ValueError(
            f"revision: {name} ({repo}) could not be resolved ({type(error).__name__}: {error}); nothing was written. "
            "Run `tfm pin` where the hub can be reached, or write the commit into the pins file by hand"
        ) from error
    if not isinstance(revision, str) or not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ValueError(f"revision: {name} ({repo}) gave {revision!r} (allowed: 40 hex digits); nothing was written")
    return revision


def _with_revision(text: str, name: str, revision: str) -> str:
    # edited as text, so that the comments of the file stay
    section = re.search(r"^hub:\n((?:[ #].*\n|\n)*)", text, flags=re.MULTILINE)
    entry = section and re.search(rf"^  {re.escape(name)}:\n((?:    .*\n)*)", section[1], flags=re.MULTILINE)
    line = entry and re.search(r"^    revision:.*$", entry[1], flags=re.MULTILINE)
    if not line:
        raise ValueError(f"pins: hub.{name} has no `revision:` line at four spaces; restore the layout of the file")
    start = section.start(1) + entry.start(1)
    return text[: start + line.start()] + f"    revision: '{revision}'" + text[start + line.end() :]
