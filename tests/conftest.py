"""Settings of the whole suite: one thread, fixed seeds, modest hypothesis runs, GPU tests only where a GPU is."""

import importlib.util

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    max_examples=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")

# a GPU machine may have torch but no Snakemake; what drives Snakemake is then not collected
if importlib.util.find_spec("snakemake") is None:
    collect_ignore = [
        "test_cli.py",
        "test_cli_cells.py",
        "test_cli_doctor.py",
        "test_estimate.py",
        "test_faults.py",
        "test_graft_suite.py",
        "test_paper_suite.py",
        "test_staleness.py",
        "test_suite.py",
        "test_where.py",
        "test_workflow.py",
    ]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_torch():
    """The same draws in every test, and gradients, which a cell's entry point run in this process turns off."""
    torch.manual_seed(0)
    torch.set_grad_enabled(True)


@pytest.fixture
def nan_filled_empty():
    """Memory that torch hands out uninitialised is NaN, so an output row that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory):
    """A random family of the nano architecture on disk."""
    from workflow_runs import write_tiny_family

    return write_tiny_family(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_weights):
    """A checkout in which a small slice of the nano suite ran with one core and no network, from prompts to report."""
    from workflow_runs import SLICE, checkout, run_offline

    folder = checkout(tmp_path_factory.mktemp("checkout"), tiny_weights)
    run_offline(folder, tmp_path_factory.mktemp("guard") / "hook", SLICE)
    return folder
