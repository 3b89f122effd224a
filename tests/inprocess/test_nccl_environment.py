"""The NCCL variables that an in-process restart needs to abort NCCL: set, checked, and restored."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import torch

from outlast import env, inprocess
from outlast.errors import ConfigError
from outlast.runtime import device_collectives

NEEDED = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_NVLS_ENABLE": "0",
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return a patch of the environment, on a machine that appears to have a GPU."""
    for name in (*NEEDED, "TORCHELASTIC_RUN_ID", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"):
        # Set first, so that variables that the tested code sets are removed as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


def test_nccl_variables_are_set_and_restored(gpu: pytest.MonkeyPatch) -> None:
    """On a GPU the user exports nothing; after the wrapper has ended, the environment is unchanged."""
    before = device_collectives.settle_collectives()
    assert {name: os.environ.get(name) for name in NEEDED} == NEEDED
    env.update(before)
    assert not NEEDED.keys() & os.environ.keys()


def test_error_handling_set_by_launchers_is_replaced(gpu: pytest.MonkeyPatch) -> None:
    """torchrun and outlast run set an error handling that ends the worker; the wrapper replaces it."""
    gpu.setenv("TORCHELASTIC_RUN_ID", "run")
    gpu.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    before = device_collectives.settle_collectives()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    env.update(before)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


@pytest.mark.parametrize(
    ("name", "value", "launcher"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "run"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1", "run"),
        ("NCCL_NVLS_ENABLE", "1", "run"),
    ],
)
def test_conflicting_user_variables_are_rejected(
    name: str, value: str, launcher: str | None, gpu: pytest.MonkeyPatch
) -> None:
    """A variable that prevents NCCL from being aborted is reported with its value, and the environment is not
    changed."""
    if launcher is not None:
        gpu.setenv("TORCHELASTIC_RUN_ID", launcher)
    gpu.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{name}={value} .*set it to 0"):
        device_collectives.settle_collectives()
    assert {one for one in NEEDED if one in os.environ} == {name}


def test_a_rejected_call_changes_nothing(gpu: pytest.MonkeyPatch) -> None:
    """A wrapped function is not called outside of the main thread or with a variable that prevents an abort of NCCL;
    the environment and signal handlers are unchanged."""

    def state() -> tuple[dict[str, str], object, list[object]]:
        numbers = range(signal.SIGRTMIN + 1, signal.SIGRTMAX)
        return dict(os.environ), sys.unraisablehook, [signal.getsignal(number) for number in numbers]

    errors: list[BaseException] = []

    @inprocess.Wrapper()
    def train() -> None:
        errors.append(AssertionError("it was called"))

    def call() -> None:
        try:
            train()
        except ConfigError as error:
            errors.append(error)

    before = state()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(errors.pop())
    assert state() == before
    gpu.setenv("NCCL_NVLS_ENABLE", "1")
    before = state()
    call()
    assert "NCCL_NVLS_ENABLE=1" in str(errors.pop())
    assert state() == before
    assert not errors


def test_the_environment_is_unchanged_without_a_device(gpu: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing is set or rejected, because NCCL is not used."""
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    gpu.setenv("NCCL_NVLS_ENABLE", "1")
    assert device_collectives.settle_collectives() == {}
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in os.environ


def test_an_nccl_timeout_within_the_hard_timeout_is_rejected(gpu: pytest.MonkeyPatch) -> None:
    """A group whose watchdog would end the process before the wrapper can interrupt it is rejected, and the error
    says what to do."""
    for backend in ("nccl", "cuda:nccl,cpu:gloo", "undefined"):
        with pytest.raises(ConfigError, match=r"longer than hard_timeout=90.*longer timeout"):
            device_collectives.check_collectives(backend, 90.0, hard_timeout_s=90.0)
        device_collectives.check_collectives(backend, 90.5, hard_timeout_s=90.0)
    device_collectives.check_collectives("gloo", 1.0, hard_timeout_s=90.0)
    gpu.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "60")
    with pytest.raises(ConfigError, match=r"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60.*unset it"):
        device_collectives.check_collectives("nccl", 600.0, hard_timeout_s=90.0)
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    device_collectives.check_collectives("undefined", 1.0, hard_timeout_s=90.0)
