"""The API of ``kempnerforge.resilience``, with the same result on all ranks.

A script changes its import and keeps its calls. The difference: where one rank alone used to decide, all ranks agree,
so :meth:`ShutdownHandler.should_shutdown` and the checks are collective calls.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from outlast.errors import ExitReason, NotFinite
from outlast.health.devices import check_gpu
from outlast.health.probing import CheckResult, Status, has_failed
from outlast.health.process_group import check_process_group
from outlast.integrations.slurm import jobs
from outlast.numerics.nonfinite import NonFiniteDetector
from outlast.preemption.listener import ShutdownListener
from outlast.runtime.consensus import Consensus
from outlast.runtime.process_groups import current_place, is_initialised
from outlast.runtime.slurm_job import SLURMInfo, get_slurm_info, is_requeued, log_job_info

__all__ = [
    "GPUHealth",
    "NaNDetector",
    "NaNState",
    "SLURMInfo",
    "ShutdownHandler",
    "check_gpu_health",
    "check_nccl_health",
    "get_slurm_info",
    "is_slurm_job",
    "is_slurm_requeue",
    "log_health_status",
    "log_job_info",
    "resolve_resume_path",
]

log = logging.getLogger(__name__)
_AGREE_S = 600.0


class ShutdownHandler:
    """Handle SIGTERM and SIGUSR1, and end the process if the shutdown takes too long.

    ::

        handler = ShutdownHandler(timeout_sec=600.0)
        handler.register()
        for step in range(num_steps):
            train(step)
            if handler.should_shutdown():
                save(step)
                break
        handler.finish()

    Args:
        timeout_sec: Seconds after the first signal at which the process exits with code 75, even if it hangs in C code;
            0 = no limit.

    Thread: the main thread, for all methods.
    """

    def __init__(self, timeout_sec: float = 600.0) -> None:
        self.timeout_sec = timeout_sec
        self._listener: ShutdownListener | None = None
        self._consensus: Consensus | None = None
        self._is_agreed = False
        self._signal: signal.Signals | None = None

    @property
    def shutdown_requested(self) -> bool:
        """Whether this process received a signal, or :meth:`should_shutdown` returned ``True``.

        It may differ between ranks: exit the loop by :meth:`should_shutdown`.
        """
        return self._is_agreed or self.signal_received is not None

    @property
    def signal_received(self) -> signal.Signals | None:
        """The first signal that this process received; ``None`` = none."""
        notice = self._listener.first if self._listener is not None else None
        if notice is not None and notice.signal is not None:
            self._signal = signal.Signals(notice.signal)
        return self._signal

    def register(self) -> None:
        """Start to handle the signals. Idempotent.

        Raises:
            OutlastError: Not called from the main thread.
        """
        if self._listener is None:
            self._listener = ShutdownListener((signal.SIGTERM, signal.SIGUSR1), deadline_s=self.timeout_sec)

    def should_shutdown(self) -> bool:
        """Return whether any rank received a signal; the same on all ranks, so that all save the same step.

        Raises:
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks of the default group, if there is one, once a step.
        Blocks: until all ranks have arrived.
        """
        mine = self._listener is not None and self._listener.is_requested
        if not is_initialised() or (world_size := current_place().world_size) == 1:
            return mine
        if self._consensus is None:
            self._consensus = Consensus(["shutdown"], world_size=world_size, timeout_s=_AGREE_S)
        is_agreed = any(self._consensus.agree([int(mine)]))
        self._is_agreed = self._is_agreed or is_agreed
        return is_agreed

    def finish(self) -> None:
        """Stop handling the signals, and cancel the limit: everything is saved. Idempotent."""
        self._signal = self.signal_received
        listener, self._listener = self._listener, None
        consensus, self._consensus = self._consensus, None
        if listener is not None:
            listener.close()
        if consensus is not None:
            consensus.close()

    unregister = finish

    def __enter__(self) -> ShutdownHandler:
        self.register()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.finish()


@dataclass(slots=True, kw_only=True)
class NaNState:
    """State of a detector."""

    consecutive_nans: int = 0
    """Bad steps in a row."""
    total_nans: int = 0
    """Bad steps."""
    last_good_loss: float = float("inf")
    """This rank's loss of the last step that was good on all ranks."""
    last_good_step: int = 0
    nan_steps: list[int] = field(default_factory=list)
    """Numbers of bad steps, the first ``max_history``."""


class NaNDetector:
    """Detect a loss that is NaN or infinite on any rank, and react the same on all ranks.

    Args:
        action: ``warn``: log it; ``skip``: log it, and drop the optimizers' gradients, so that no weight moves;
            ``raise``: raise ``outlast.errors.NotFinite``.
        max_consecutive: Bad steps in a row after which :attr:`should_rollback` is true; 0 = no limit. The script then
            exits its loop, and its code after the loop runs. The process exits with code 17 instead of its own, so that
            no launcher restarts it or counts the run as finished; :meth:`reset` cancels that. A script that continues
            with one more bad step is ended there.
        max_history: Numbers of bad steps that :attr:`state` keeps.

    Raises:
        ConfigError: The action is unknown, or the limit negative.
    """

    def __init__(self, action: str = "warn", max_consecutive: int = 5, max_history: int = 100) -> None:
        self.action, self.max_consecutive, self.max_history = action, max_consecutive, max_history
        self.state = NaNState()
        """State since the start, or the last :meth:`reset`; the same on all ranks, except for the loss."""
        self._detector = NonFiniteDetector(action=action, max_consecutive=max_consecutive, check_gradients=False)
        self._gradients = NonFiniteDetector(action=action, max_consecutive=0, check_gradients=True)

    def check_loss(
        self,
        loss: torch.Tensor | float,
        step: int | None = None,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    ) -> bool:
        """Judge a step's loss, before the optimizer's step.

        Args:
            loss: This rank's loss.
            step: Its number, for the log.
            optimizers: Whose gradients ``skip`` drops; without them skip the step yourself.

        Returns:
            Whether the loss is finite on all ranks, whatever the action; the same on all ranks. If not, skip the
                optimizer's step.

        Raises:
            NotFinite: It is not finite, and the action is ``raise``, or the limit was reached before; on all ranks.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks of the default group, once a step.
        Blocks: until all ranks have arrived.
        """
        try:
            found = self._detector.check(loss, optimizers, iteration=step)
        except NotFinite as error:
            self._note_bad(error.iteration)
            if self.action == "raise" or self._detector.num_consecutive != self.max_consecutive:
                raise
            _ends_invalid.append(self)
            log.error("%s; leave the training loop: this process ends with exit code 17", error)
            return False
        if not found.finite:
            self._note_bad(found.iteration)
            return False
        self.state.consecutive_nans = 0
        self.state.last_good_loss, self.state.last_good_step = _as_number(loss), found.iteration
        return True

    def check_gradients(self, model: torch.nn.Module, step: int | None = None) -> bool:
        """Judge the gradients of a model, before the optimizer's step; they are not counted in :attr:`state`.

        Args:
            model: With ``skip`` its gradients are dropped if they are bad.
            step: Its number, for the log.

        Returns:
            Whether they are finite on all ranks; the same on all ranks.

        Raises:
            NotFinite: They are not, and the action is ``raise``; on all ranks.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks of the default group.
        Blocks: until all ranks have arrived.
        """
        parameters = list(model.parameters()) or [torch.nn.Parameter(torch.empty(0))]
        holder = torch.optim.SGD(parameters, lr=0.0)  # never steps: the detector takes gradients from optimizers
        return self._gradients.check(None, holder, iteration=step).finite

    @property
    def consecutive_count(self) -> int:
        """Bad steps in a row so far."""
        return self._detector.num_consecutive

    @property
    def should_rollback(self) -> bool:
        """Whether the limit of bad steps in a row is reached: the script must exit its loop."""
        return 0 < self.max_consecutive <= self._detector.num_consecutive

    def reset(self) -> None:
        """Reset the state, for example after an earlier checkpoint was loaded; call it on all ranks."""
        self.state, self._detector.num_consecutive = NaNState(), 0
        _ends_invalid[:] = [one for one in _ends_invalid if one is not self]

    def close(self) -> None:
        """Close the detector; peers that wait for this rank fail. Idempotent."""
        self._detector.close()
        self._gradients.close()

    def _note_bad(self, step: int | None) -> None:
        self.state.consecutive_nans = self._detector.num_consecutive
        self.state.total_nans += 1
        if step is not None and len(self.state.nan_steps) < self.max_history:
            self.state.nan_steps.append(step)


_ends_invalid: list[NaNDetector] = []
"""Detectors whose limit is reached."""
_pid = os.getpid()


@atexit.register  # at import, so that handlers that a script registers later run before
def _end_invalid() -> None:
    """Exit with 17 if a limit is reached, after the script and its exit handlers have ended."""
    if _ends_invalid and os.getpid() == _pid:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(ExitReason.FAILED_VALIDATION)


def _as_number(loss: torch.Tensor | float) -> float:
    if not isinstance(loss, torch.Tensor):
        return float(loss)
    local = loss.detach()
    return float((local.to_local() if isinstance(local, DTensor) else local).float().mean())


def check_nccl_health(timeout_sec: float = 10.0) -> bool:
    """Return whether all ranks respond, over a separate group; ranks that do not are logged.

    Without a process group the result is ``True``.

    Collective: all ranks of the default group, if there is one.
    Blocks: up to about twice ``timeout_sec``.
    """
    if not is_initialised():
        return True
    result = check_process_group(timeout_sec)
    if has_failed((result,)):
        log.error("%s", result.describe())
        return False
    return True


class GPUHealth(dict[str, bool | str]):
    """Result of :func:`check_gpu_health`, with KempnerForge's keys; true if no check has failed.

    Keys: ``cuda_available``, ``device_accessible``, ``compute_ok``, ``memory_ok``, ``error`` (empty = none). Without a
    GPU all are false, and the truth value is that of the CPU's arithmetic check.
    """

    def __init__(self, results: Iterable[CheckResult]) -> None:
        results = tuple(results)
        counted = next((one for one in results if one.name == "devices"), None)
        is_available = counted is not None and bool(counted.facts.get("num_devices"))

        def passed(name: str, *bad: Status) -> bool:
            found = [one for one in results if one.name == name]
            return is_available and bool(found) and not any(one.status in bad for one in found)

        self.is_healthy = not has_failed(results)
        failed = "; ".join(one.describe() for one in results if one.has_failed)
        super().__init__(
            cuda_available=is_available,
            device_accessible=passed("compute", Status.LOST, Status.TIMED_OUT, Status.ERROR),
            compute_ok=passed("compute", *_BAD),
            memory_ok=passed("device memory", *_BAD),
            error=failed or ("" if is_available else "CUDA not available"),
        )

    def __bool__(self) -> bool:
        return self.is_healthy


_BAD = (Status.FAILED, Status.LOST, Status.TIMED_OUT, Status.ERROR)


def check_gpu_health(device: int | torch.device | None = None) -> GPUHealth:
    """Check that a GPU computes correctly and that its memory keeps data; failures are logged.

    The checks run in another process: a driver that hangs or crashes fails them, and this process continues.

    Args:
        device: Its number, or a torch device; ``None`` = all. Without a GPU the CPU's arithmetic is checked.

    Returns:
        A mapping with KempnerForge's keys, which is true if everything is healthy.

    Blocks: up to ``health.device_timeout`` (120 s) for each check.
    """
    number = device.index if isinstance(device, torch.device) else device
    results = check_gpu(number)
    for result in results:
        if has_failed((result,)):
            log.error("%s", result.describe())
    return GPUHealth(results)


def log_health_status(device: int | torch.device | None = None) -> bool:
    """Return whether :func:`check_gpu_health` finds everything healthy, and log it in one line.

    Blocks: like :func:`check_gpu_health`.
    """
    is_healthy = bool(check_gpu_health(device))
    what = "all GPUs" if device is None else f"GPU {device}"
    if is_healthy:
        log.info("health of %s: HEALTHY", what)
    else:
        log.warning("health of %s: UNHEALTHY; see the log lines above for the failed checks", what)
    return is_healthy


_STEP = re.compile(r"step_(?P<step>\d+)")


def resolve_resume_path(checkpoint_dir: str | os.PathLike[str]) -> Path | str | None:
    """Return the newest checkpoint in a directory, of outlast or of KempnerForge; ``None`` if there is none.

    A checkpoint of outlast (``step-N``) is returned once every byte is verified. A checkpoint of KempnerForge is the
    target of ``latest``, else the ``step_N`` with the highest number, if it is complete according to its ``.metadata``;
    a WARNING is logged, since only the code that saved it can load it. Of the two, the one with more steps is returned.

    Args:
        checkpoint_dir: The directory; a URL may contain checkpoints of outlast only.

    Returns:
        The checkpoint's folder; a URL for a URL.

    Raises:
        ConfigError: It exists and is not a checkpoint directory.
        CheckpointError: The object store cannot be reached.
        OSError: It cannot be read.

    Blocks: while the newest checkpoint of outlast is read.
    """
    folder = Path(checkpoint_dir)
    theirs = _newest_of_kempnerforge(folder) if folder.is_dir() else None
    own = jobs.resolve_resume_path(checkpoint_dir, warns_of_others=False)
    if theirs is None:
        return own
    own_step = -1 if own is None else int(Path(own).name.rpartition("-")[2])
    found = _STEP.fullmatch(theirs.name)
    if own is not None and (found is None or int(found["step"]) <= own_step):
        return own
    log.warning(
        "resuming from %s, a checkpoint of KempnerForge: its bytes are not verified, and only the code that saved it "
        "can load it (run.steps() cannot)",
        theirs,
    )
    return theirs


def _newest_of_kempnerforge(folder: Path) -> Path | None:
    """Return the checkpoint from which KempnerForge would resume; an incomplete one only if there is no other."""
    steps = [path for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    steps.sort(key=lambda path: int(path.name.partition("_")[2]), reverse=True)
    latest = folder / "latest"
    known = list(dict.fromkeys([*([latest.resolve()] if latest.is_dir() else []), *(path.resolve() for path in steps)]))
    for path in known:
        if any(".metadata" in names for _, _, names in os.walk(path)):
            return path
        log.warning("%s has no .metadata: its save was cut short", path)
    return known[0] if known else None


def is_slurm_job() -> bool:
    """Return whether this process belongs to a Slurm job."""
    return get_slurm_info() is not None


def is_slurm_requeue() -> bool:
    """Return whether the job was requeued; ``False`` outside of Slurm."""
    return is_requeued()
