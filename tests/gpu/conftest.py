"""Setup of the tests on a GPU: fresh processes, a time limit for each, and an available device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from device_runs import DETERMINISTIC, DEVICE, ON_GPU, own_device

_TIMEOUT_S = 120
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for all started processes: an existing GPU must not be used


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the processes of these tests afresh: a fork server would hide effects of importing torch before a fork.

    Warnings are not errors here: they depend on the driver and on the build of torch.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.cold)
            if item.get_closest_marker("process") is not None:
                item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """Return the device; tests selected by ``-m gpu`` fail where there is none."""
    if DEVICE not in ("cuda", "cpu"):
        pytest.fail(f"OUTLAST_TEST_DEVICE={DEVICE} is neither cuda nor cpu")
    if ON_GPU and not torch.cuda.is_available():
        pytest.fail("torch can use no GPU here; set OUTLAST_TEST_DEVICE=cpu to run these programs on the CPU")
    return own_device()


@pytest.fixture(scope="session")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return variables with which inductor selects no kernel by its speed, and compiles each kernel once."""
    cache = str(tmp_path_factory.mktemp("inductor"))
    own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_DETERMINISTIC": "1"}
    return DETERMINISTIC | own
