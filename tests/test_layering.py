"""Imports point one way: kernels, tfm, baselines, workflows/scripts; each may import only what stands to its left."""

import ast
from pathlib import Path

import pytest

from baselines.methods import METHODS
from tfm.manifest import import_closure

ROOT = Path(__file__).resolve().parent.parent
ORDER = {"tfm_kernels": "kernels", "tfm": "tfm", "baselines": "baselines", "scripts": "workflows/scripts"}
SOURCES = [
    (package, path)
    for package, folder in ORDER.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
]


def imported(path: Path, package: str) -> set[str]:
    """Return the top-level names a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(package if node.level else node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("package", "path"), [pytest.param(*source, id=source[1].relative_to(ROOT).as_posix()) for source in SOURCES]
)
def test_a_file_imports_only_from_packages_to_its_left(package, path):
    order = list(ORDER)
    names = imported(path, package)
    assert not names & set(order[order.index(package) + 1 :])
    if package != "scripts":
        scripts = {script.stem for script in (ROOT / ORDER["scripts"]).glob("*.py")}
        assert not names & (scripts | {"workflows", "tests"})


def test_the_folder_kernels_is_no_package():
    # a widely installed package is called kernels, and transformers imports it when it is there
    assert not (ROOT / "kernels/__init__.py").exists()
    assert all("kernels" not in imported(path, package) for package, path in SOURCES)


@pytest.mark.parametrize("name", ["tfm", "baselines", "kernels/gdn", "tfm/train", "tfm/data"])
def test_package_inits_of_methods_import_no_module_of_ours(name):
    # otherwise a method's source digest would reach every method
    path = ROOT / name / "__init__.py"
    if name != "kernels/gdn":
        assert not imported(path, name.replace("/", ".")) & {"tfm", "baselines"}


def test_the_loop_knows_no_method():
    text = (ROOT / "tfm/decode.py").read_text()
    names = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    assert not names & {"ar", "dflash", "ddtree", "dartree", "tfm"}
    assert "baselines" not in imported(ROOT / "tfm/decode.py", "tfm")


def test_tfm_names_no_other_method_and_no_method_reads_the_registry():
    """A new method is an entry of METHODS and leaves the source digest of the others alone."""
    others = set(METHODS) - {"tfm"}
    built_on = {"dartfixed": {"dartree"}, "headddtree": {"ddtree", "headchain"}}
    elsewhere = {"ar", "dflash"}  # the reference of every speedup, and a prompt protocol
    for path in (path for package, path in SOURCES if package == "tfm"):
        names = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not names & others - elsewhere, path
    for name, method in METHODS.items():
        reached = import_closure(["tfm.decode", method.factory.partition(":")[0]])
        assert "baselines.methods" not in reached, name
        assert not [
            module
            for module in reached
            if module.removeprefix("baselines.") in others - {name} - built_on.get(name, set())
        ], name


def text_calls(path: Path):
    """Yield the lines of calls that read or write text in the locale's encoding."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        is_binary = any(isinstance(part, ast.Constant) and "b" in str(part.value) for part in node.args[:2])
        is_own_open = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in (
            "os",
            "subprocess",
        )
        if name in ("read_text", "write_text") or (name == "open" and not is_binary and not is_own_open):
            yield node.lineno


@pytest.mark.parametrize(
    "path", [path for _, path in SOURCES if not path.name.startswith("publish")], ids=lambda path: path.name
)
def test_text_is_utf_8_whatever_the_locale_says(path):
    """Tables failed after the last cell of a suite: the paper's numbers were read as ASCII, and hold a mu."""
    assert not list(text_calls(path))
