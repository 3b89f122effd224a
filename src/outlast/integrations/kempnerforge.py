"""The names of ``kempnerforge.resilience``, over the parts of this package that do the same on all ranks alike.

A script changes its import and keeps its calls. What differs, differs where one rank alone used to decide: here all
ranks agree, at the price that :meth:`ShutdownHandler.should_shutdown` and the checks are collective calls.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable

import torch

from outlast.health.devices import check_gpu
from outlast.health.probing import has_failed
from outlast.health.process_group import check_process_group
from outlast.integrations.slurm.jobs import resolve_resume_path
from outlast.numerics.nonfinite import NonFiniteDetector
from outlast.preemption.listener import ShutdownListener
from outlast.runtime.consensus import Consensus
from outlast.runtime.process_groups import current_place, is_initialised
from outlast.runtime.slurm_job import SLURMInfo, get_slurm_info, log_job_info

__all__ = [
    "NaNDetector",
    "SLURMInfo",
    "ShutdownHandler",
    "check_gpu_health",
    "check_nccl_health",
    "get_slurm_info",
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
        return any(self._consensus.agree([int(mine)]))

    def finish(self) -> None:
        """Listen no longer, and cancel the limit: everything is saved. Idempotent."""
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


class NaNDetector:
    """Look for a loss that is NaN or infinite on any rank, and have all ranks do the same about it.

    Args:
        action: ``warn``: log it; ``skip``: log it, and drop the optimizers' gradients, so that no weight moves;
            ``raise``: raise ``outlast.errors.NotFinite``.
        max_consecutive: Bad steps in a row of which the last ends the run, with exit code 17; 0 = no limit.

    Raises:
        ConfigError: The action is unknown, or the limit negative.
    """

    def __init__(self, action: str = "warn", max_consecutive: int = 5) -> None:
        self.action, self.max_consecutive = action, max_consecutive
        self._detector = NonFiniteDetector(action=action, max_consecutive=max_consecutive, check_gradients=False)

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
            Whether the optimizer should step, the same on all ranks.

        Raises:
            NotFinite: It is not finite, and the action is ``raise``, or the limit is reached; on all ranks.
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks of the default group, once a step.
        Blocks: until all ranks have come.
        """
        return self._detector.check(loss, optimizers, iteration=step).should_step

    @property
    def consecutive_count(self) -> int:
        """Bad steps in a row so far."""
        return self._detector.num_consecutive

    def close(self) -> None:
        """Leave; peers that wait for this rank fail. Idempotent."""
        self._detector.close()


def check_nccl_health(timeout_sec: float = 10.0) -> bool:
    """Return whether all ranks answer, over a group of its own; which do not is logged.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised.

    Collective: all ranks of the default group.
    Blocks: up to about twice ``timeout_sec``.
    """
    result = check_process_group(timeout_sec)
    if has_failed((result,)):
        log.error("%s", result.describe())
        return False
    return True


def check_gpu_health(device: int | torch.device | None = None) -> bool:
    """Return whether a GPU computes, and keeps what is written; what fails is logged.

    The checks run in another process: a driver that hangs or crashes has failed them, and this process goes on.

    Args:
        device: Its number, or a torch device; ``None`` = all. Where there is none, the CPU's arithmetic is checked.

    Blocks: up to ``health.device_timeout`` (120 s) for each check.
    """
    number = device.index if isinstance(device, torch.device) else device
    results = check_gpu(number)
    for result in results:
        if has_failed((result,)):
            log.error("%s", result.describe())
    return not has_failed(results)
