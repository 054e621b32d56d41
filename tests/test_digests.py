"""Digests of code, cells and weights: what changes them, and what does not."""

import json

import pytest

from tfm import manifest


def project(root, files: dict[str, str]):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FILES = {
    "tfm/__init__.py": "",
    "tfm/decode.py": "import torch\nfrom tfm.tree import build\n",
    "tfm/tree.py": "from tfm_kernels.gdn import ops\n",
    "tfm/unused.py": "X = 1\n",
    "kernels/gdn/__init__.py": "",
    "kernels/gdn/ops.py": "def op(x):\n    return x + 1\n",
    "kernels/gdn/csrc/op.cu": "// device code",
    "baselines/__init__.py": 'METHODS = {"ar": "baselines.ar:make", "tfm": "baselines.tfm:make"}\n',
    "baselines/ar.py": "from tfm.tree import build\n",
    "baselines/tfm.py": "X = 2\n",
}


def test_the_closure_follows_imports_and_no_strings(tmp_path):
    project(tmp_path, FILES)
    found = manifest.import_closure(["tfm.decode", "baselines.ar"], tmp_path)
    assert found == [
        "baselines",
        "baselines.ar",
        "tfm",
        "tfm.decode",
        "tfm.tree",
        "tfm_kernels.gdn",
        "tfm_kernels.gdn.ops",
    ]


CHANGES = {
    "comment": ("kernels/gdn/ops.py", "# why\ndef op(x):\n    return x + 1\n", False),
    "docstring": ("kernels/gdn/ops.py", 'def op(x):\n    """Add."""\n    return x + 1\n', False),
    "layout": ("kernels/gdn/ops.py", "def op(x):\n    return (x\n            + 1)\n", False),
    "constant": ("kernels/gdn/ops.py", "def op(x):\n    return x + 2\n", True),
    "operator": ("kernels/gdn/ops.py", "def op(x):\n    return x - 1\n", True),
    "device_code_of_another_backend": ("kernels/gdn/csrc/op.cu", "// other device code", False),
    "module_of_this_method": ("baselines/ar.py", "from tfm.tree import build\nX = 3\n", True),
    "module_of_another_method": ("baselines/tfm.py", "X = 9\n", False),
    "module_nobody_imports": ("tfm/unused.py", "X = 9\n", False),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_the_source_digest_changes_with_the_code_that_decides_tokens(tmp_path, change):
    project(tmp_path, FILES)
    before = manifest.source_digest("baselines.ar:make", tmp_path)
    path, text, differs = CHANGES[change]
    project(tmp_path, {path: text})
    assert (manifest.source_digest("baselines.ar:make", tmp_path) != before) == differs


def test_the_source_digest_covers_a_kernel_only_for_the_cells_that_use_it(tmp_path):
    kernel = "kernels/gdn/fused_triton.py"
    project(tmp_path, {**FILES, kernel: "X = 1\n"})
    before = [manifest.source_digest("baselines.ar:make", tmp_path, gdn_backend=b) for b in ("solve", "fused_triton")]
    project(tmp_path, {kernel: "X = 2\n"})
    after = [manifest.source_digest("baselines.ar:make", tmp_path, gdn_backend=b) for b in ("solve", "fused_triton")]
    assert after[0] == before[0] and after[1] != before[1] and before[0] != before[1]


def test_the_source_digest_covers_device_code_for_the_cells_that_run_it(tmp_path):
    project(tmp_path, {**FILES, "kernels/gdn/fused_cuda.py": "X = 1\n"})
    before = manifest.source_digest("baselines.ar:make", tmp_path, gdn_backend="fused_cuda")
    project(tmp_path, {"kernels/gdn/csrc/op.cu": "// other device code"})
    assert manifest.source_digest("baselines.ar:make", tmp_path, gdn_backend="fused_cuda") != before


def test_an_unknown_method_module_is_an_error(tmp_path):
    project(tmp_path, FILES)
    with pytest.raises(FileNotFoundError, match="baselines.nope"):
        manifest.source_digest("baselines.nope:make", tmp_path)


def test_cell_digests_differ_by_code_config_and_prompts():
    digests = {
        manifest.cell_digest({"seed": seed}, source=source, prompts_sha256=prompts)
        for seed in (0, 1)
        for source in "st"
        for prompts in "pq"
    }
    assert len(digests) == 8
    one, other = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    same = {manifest.cell_digest(cell, source="s", prompts_sha256="p") for cell in (one, other)}
    assert len(same) == 1


def test_the_digest_of_weights_covers_tensors_and_config_but_no_card(tmp_path):
    project(tmp_path, {"model.safetensors": "x", "config.json": "{}", "README.md": "card"})
    before = manifest.sha256_weights(tmp_path)
    project(tmp_path, {"README.md": "better card"})
    assert manifest.sha256_weights(tmp_path) == before
    project(tmp_path, {"config.json": "{ }"})
    assert manifest.sha256_weights(tmp_path) != before
    assert manifest.sha256_weights(tmp_path / "none") is None


def test_environment_facts_name_no_machine_user_or_path():
    import getpass
    import socket
    from pathlib import Path

    text = json.dumps(manifest.environment())
    words = [socket.gethostname(), str(Path.cwd()), str(Path.home()), getpass.getuser()]
    # names of two or three letters occur in ordinary words
    assert not [word for word in words if len(word) > 3 and word in text]
