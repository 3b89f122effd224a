"""The names of ``kempnerforge.resilience``, over the parts of this package that do the same on all ranks alike.

A script changes its import and keeps its calls. What differs, differs where one rank alone used to decide: here all
ranks agree, at the price that :meth:`ShutdownHandler.should_shutdown` and the checks are collective calls.
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
    """Take note of SIGTERM and SIGUSR1, and end the process when leaving takes too long.

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
        timeout_sec: Seconds from the first signal within which the process has ended, also where it hangs in C code,
            with exit code 75; 0 = no limit.

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
        """Whether this process was signalled, or :meth:`should_shutdown` has said that any rank was.

        It may differ between ranks: leave the loop by :meth:`should_shutdown`.
        """
        return self._is_agreed or self.signal_received is not None

    @property
    def signal_received(self) -> signal.Signals | None:
        """The signal that this process got first; ``None``: it got none."""
        notice = self._listener.first if self._listener is not None else None
        if notice is not None and notice.signal is not None:
            self._signal = signal.Signals(notice.signal)
        return self._signal

    def register(self) -> None:
        """Listen from now on. Idempotent.

        Raises:
            OutlastError: Not called from the main thread.
        """
        if self._listener is None:
            self._listener = ShutdownListener((signal.SIGTERM, signal.SIGUSR1), deadline_s=self.timeout_sec)

    def should_shutdown(self) -> bool:
        """Return whether any rank was signalled; the same on all ranks, so that all save the same step.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks of the default group, where there is one, once a step.
        Blocks: until all ranks have come.
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
        """Listen no longer, and cancel the limit: everything is saved. Idempotent."""
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
    """What a detector has seen so far."""

    consecutive_nans: int = 0
    """Bad steps in a row."""
    total_nans: int = 0
    """Bad steps."""
    last_good_loss: float = float("inf")
    """This rank's loss of the last step that was good on all ranks."""
    last_good_step: int = 0
    """The number of that step."""
    nan_steps: list[int] = field(default_factory=list)
    """Numbers of bad steps, the first ``max_history``."""


class NaNDetector:
    """Look for a loss that is NaN or infinite on any rank, and have all ranks do the same about it.

    Args:
        action: ``warn``: log it; ``skip``: log it, and drop the optimizers' gradients, so that no weight moves;
            ``raise``: raise ``outlast.errors.NotFinite``.
        max_consecutive: Bad steps in a row after which :attr:`should_rollback` is true; 0 = no limit. The script then
            leaves its loop, and its code after the loop runs. The process ends with exit code 17 in place of its own,
            so that no launcher restarts it or counts the run as finished; :meth:`reset` takes that back. A script that
            continues with one more bad step is ended there.
        max_history: Numbers of bad steps that :attr:`state` keeps.

    Raises:
        ConfigError: The action is unknown, or the limit negative.
    """

    def __init__(self, action: str = "warn", max_consecutive: int = 5, max_history: int = 100) -> None:
        self.action, self.max_consecutive, self.max_history = action, max_consecutive, max_history
        self.state = NaNState()
        """What was seen since the start, or the last :meth:`reset`; the same on all ranks, but for the loss."""
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
            loss: This rank's.
            step: Its number, for the log.
            optimizers: Whose gradients ``skip`` drops; without them leave the step out yourself.

        Returns:
            Whether it is finite on all ranks, whatever the action is; the same on all ranks. Where it is not, leave
            the optimizer's step out.

        Raises:
            NotFinite: It is not finite, and the action is ``raise``, or the limit was reached before; on all ranks.
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks of the default group, once a step.
        Blocks: until all ranks have come.
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
            model: With ``skip`` it loses its gradients where they are bad.
            step: Its number, for the log.

        Returns:
            Whether they are finite on all ranks; the same on all ranks.

        Raises:
            NotFinite: They are not, and the action is ``raise``; on all ranks.
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks of the default group.
        Blocks: until all ranks have come.
        """
        parameters = list(model.parameters()) or [torch.nn.Parameter(torch.empty(0))]
        holder = torch.optim.SGD(parameters, lr=0.0)  # it never steps: the detector takes gradients from optimizers
        return self._gradients.check(None, holder, iteration=step).finite

    @property
    def consecutive_count(self) -> int:
        """Bad steps in a row so far."""
        return self._detector.num_consecutive

    @property
    def should_rollback(self) -> bool:
        """Whether the limit of bad steps in a row is reached: the script is to leave its loop."""
        return 0 < self.max_consecutive <= self._detector.num_consecutive

    def reset(self) -> None:
        """Forget what was seen, for instance after an earlier checkpoint was loaded; on all ranks alike."""
        self.state, self._detector.num_consecutive = NaNState(), 0
        _ends_invalid[:] = [one for one in _ends_invalid if one is not self]

    def close(self) -> None:
        """Leave; peers that wait for this rank fail. Idempotent."""
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


@atexit.register  # as the module is imported, so that what a script registers later runs before
def _end_invalid() -> None:
    """End the process with 17 where a limit is reached, once the script and what it registered have ended."""
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
    """Return whether all ranks answer, over a group of its own; which do not is logged.

    Without a process group there is nobody to ask: ``True``.

    Collective: all ranks of the default group, where there is one.
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
    """What :func:`check_gpu_health` found, with KempnerForge's keys; true if nothing that was checked has failed.

    Keys: ``cuda_available``, ``device_accessible``, ``compute_ok``, ``memory_ok``, ``error`` (empty = none). Without a
    GPU all are false, and the truth of the whole is that of the arithmetic of the CPU.
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
    """Check that a GPU computes, and keeps what is written; what fails is logged.

    The checks run in another process: a driver that hangs or crashes has failed them, and this process continues.

    Args:
        device: Its number, or a torch device; ``None`` = all. Where there is none, the CPU's arithmetic is checked.

    Returns:
        A mapping with KempnerForge's keys, which is true where everything is healthy.

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

    Blocks: as that.
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
    """Return the newest checkpoint in a directory, of outlast or of KempnerForge; ``None`` where there is none.

    A checkpoint of outlast (``step-N``) is returned once every byte of it is verified. One of KempnerForge is what
    ``latest`` leads to, else the ``step_N`` with the highest number, if its ``.metadata`` shows that it is whole; it is
    returned with a WARNING, since only the code that saved it can load it. Of the two the one with more steps counts.

    Args:
        checkpoint_dir: The directory; a URL may hold checkpoints of outlast alone.

    Returns:
        The checkpoint's folder; a URL when a URL was given.

    Raises:
        ConfigError: It is there and is not a directory of checkpoints.
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
    """Return the checkpoint that KempnerForge would resume from; one that is cut short only where there is no other."""
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
    """Return whether its job ran before and was re-queued; outside of Slurm it was not."""
    return is_requeued()
