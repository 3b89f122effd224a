"""Infinite and NaN values are reported at the save, and an older checkpoint without them is loaded."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from outlast.checkpoint import CheckpointManager, Restored
from outlast.checkpoint.manager import open_manager
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError
from outlast.policy.recovery_point import Exclusion
from outlast.runtime.injection import armed

pytestmark = pytest.mark.process
NAN, INF = float("nan"), float("inf")


def _manager(folder: Path, **settings: object) -> CheckpointManager:
    config = CheckpointConfig(  # type: ignore[arg-type]
        directory=str(folder / "global"),
        local_directory=str(folder / "local"),
        save_timeout=30,
        suspect_window=0,
        **{"most_recent_k": 2, "local_most_recent_k": 2, **settings},
    )
    return open_manager(config, env=WorkerEnv(node="node"))


def _save(folder: Path, values: dict[int, list[float]]) -> None:
    state = {"model": {"weight": torch.ones(100), "bias": torch.zeros(2)}, "n": 0}
    with closing(_manager(folder)) as manager:
        for iteration, value in values.items():
            state["model"]["bias"][:] = torch.tensor(value)  # type: ignore[index]
            state["n"] = iteration
            manager.save(state, iteration).wait(30)


def _load(folder: Path, **settings: object) -> tuple[Restored, int]:
    state = {"model": {"weight": torch.zeros(100), "bias": torch.zeros(2)}, "n": 0}
    with closing(_manager(folder, **settings)) as manager:
        restored = manager.load_latest(state)
    assert restored is not None
    assert state["n"] == restored.iteration
    return restored, restored.iteration


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return messages


def test_a_load_skips_newer_checkpoints_with_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save reports rank and tensor of a NaN once; a load skips such checkpoints and logs which setting changes that.

    The last finite checkpoint is kept, however many newer ones there are. With ``prefer_finite`` off the newest is
    loaded.
    """
    _save(tmp_path, {1: [0.0, 1.0], 2: [NAN, 1.0], 3: [NAN, INF], 4: [NAN, NAN]})
    (warning,) = _warnings(caplog)
    assert "iteration 2 is saved with numbers that are infinite or NaN: rank 0 in state.model.bias; a load" in warning
    for place in ("global", "local/node"):
        assert sorted(path.name for path in (tmp_path / place).glob("step-*")) == ["step-1", "step-3", "step-4"]
    restored, iteration = _load(tmp_path)
    assert (iteration, restored.finite) == (1, True)
    assert [(one.checkpoint, one.kind) for one in restored.rejected] == [(4, "NotFinite"), (3, "NotFinite")]
    warning = "\n".join(_warnings(caplog))
    assert "skipped: checkpoint 4" in warning
    assert "checkpoint 1 contains none; if they are expected, set prefer_finite=false" in warning
    restored, iteration = _load(tmp_path, prefer_finite=False)
    assert (iteration, restored.finite, restored.rejected) == (4, False, [])
    assert "the loaded checkpoint 4 contains numbers that are infinite or NaN" in "\n".join(_warnings(caplog))


def test_the_newest_is_loaded_if_none_is_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If no older checkpoint is finite, the newest is loaded; the first save and the load log that."""
    _save(tmp_path, {1: [-INF, 0.0], 2: [-INF, 1.0]})
    assert len(_warnings(caplog)) == 1
    restored, iteration = _load(tmp_path)
    assert (iteration, restored.finite, restored.rejected) == (2, False, [])
    assert "there is no older one without them" in "\n".join(_warnings(caplog))


FLOATS = sorted(
    {one for one in vars(torch).values() if isinstance(one, torch.dtype) and one.is_floating_point}
    - {getattr(torch, "float4_e2m1fn_x2", None)},
    key=str,
)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_buffers_of_each_float_type_are_restored(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model's buffer of any float type is saved without a warning and loaded bit by bit, infinities included."""
    numbers = torch.tensor([-1.0, 0.5, 2.0, -INF, INF]).to(dtype)
    numbers = numbers[~numbers.float().isnan()].clone()
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", numbers.clone())
    with closing(_manager(tmp_path)) as manager:
        manager.load_latest({"model": model})
        manager.save({"model": model}, 1).wait(30)
        assert _warnings(caplog) == []
    model.table.view(torch.uint8).zero_()
    with closing(_manager(tmp_path)) as manager:
        restored = manager.load_latest({"model": model})
    assert restored is not None
    assert (restored.iteration, restored.finite) == (1, True)
    assert torch.equal(model.table.view(torch.uint8), numbers.view(torch.uint8))


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "in-memory"])
def test_the_last_finite_checkpoint_survives_restarts(tmp_path: Path, is_loaded: bool) -> None:
    """A run that diverges again after a restart keeps its last finite checkpoint.

    This holds whichever process saved the checkpoints with NaN, and whether the state was loaded or kept in memory.
    """
    nan = [NAN, 1.0]
    _save(tmp_path, {1: [0.0, 1.0], 2: nan, 3: nan, 4: nan})
    state = {"model": {"weight": torch.ones(100), "bias": torch.tensor(nan)}, "n": 0}
    with closing(_manager(tmp_path)) as manager:
        if is_loaded:
            restored = manager.load_latest(state)
            assert restored is not None
            assert restored.iteration == 1
            state["model"]["bias"][:] = torch.tensor(nan)  # type: ignore[index]
        else:
            manager.go_on(state, 4, None)
        for iteration in (2, 3, 4) if is_loaded else (5, 6, 7):
            state["n"] = iteration
            manager.save(state, iteration).wait(30)
    for place in ("global", "local/node"):
        assert "step-1" in [path.name for path in (tmp_path / place).glob("step-*")]
    restored, iteration = _load(tmp_path)
    assert (iteration, restored.finite) == (1, True)


def test_an_excluded_checkpoint_is_not_reported_as_nonfinite(tmp_path: Path) -> None:
    """If all checkpoints hold NaN and the newest is excluded, the older one is loaded and not reported as finite."""
    local_config = CheckpointConfig(local_directory=str(tmp_path), save_timeout=30)
    state = {"bias": torch.tensor([NAN])}
    attempt = ""
    for cycle in (0, 1):
        with closing(open_manager(local_config, env=WorkerEnv(node="node", cycle=cycle))) as manager:
            manager.load_latest(state)
            handle = manager.save(state, 10 + 10 * cycle)
            handle.wait(30)
            attempt = handle.attempt
    lost_copy = Exclusion(
        checkpoint=15, attempt=f"{attempt}5", tier="local"
    )  # of the second cycle, and no longer present
    untrusted = msgspec.json.encode([lost_copy]).decode()
    with closing(open_manager(local_config, env=WorkerEnv(node="node", cycle=2, untrusted=untrusted))) as manager:
        restored = manager.load_latest(state)
    assert restored is not None
    assert (restored.iteration, restored.finite, restored.rejected) == (10, False, [])


def test_a_failed_save_does_not_suppress_the_nan_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The NaN warning is logged at the first successful save, not at a failed one."""
    fails = [True, False]

    def fail_once(attempt: str) -> None:
        if fails.pop(0):
            raise OSError("no room")

    config = CheckpointConfig(local_directory=str(tmp_path), save_timeout=30)
    state = {"bias": torch.tensor([NAN])}
    with (
        armed("checkpoint.rename", fail_once),
        closing(open_manager(config, env=WorkerEnv(node="node"))) as manager,
    ):
        with pytest.raises(CheckpointError, match="no room"):
            manager.save(state, 1).wait(30)
        assert not [line for line in _warnings(caplog) if "is saved with" in line]
        manager.save(state, 2).wait(30)
        (warning,) = _warnings(caplog)
    assert "iteration 2 is saved with numbers that are infinite or NaN" in warning
