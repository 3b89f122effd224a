"""GPU memory of workers that were killed: the next ones on this node start once it is free again.

A process can be gone before the driver has taken back all of its memory. Workers that start meanwhile find too little
of it, and fail, or are restricted to what is left. So the memory in use is read before the first workers start, and
again after each cycle's were cleared away, until it is what it was then; never for longer than a bound, as memory that
stays in use may be another program's.

NVML reads it, in a probe process: a driver that hangs keeps nobody but that process, which imports no torch and has no
context on a GPU. It stays for the next readings, which then take some milliseconds, while the nodes agree on the next
cycle. A node without GPUs has neither thread nor process for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outlast import clock, env
from outlast.config import FaultToleranceConfig
from outlast.health.devices import DeviceMemoryUse, has_gpus
from outlast.health.probing import CheckResult, Prober, Status

log = logging.getLogger(__name__)
_READ_S = 30.0
"""How long one reading may take: the first one may have to wake the driver."""
_NOTICEABLE_S = 1.0
_CLOSE_S = 3.0


def choose_gpus(uuids: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """Return the GPUs that workers can see; all, if one is named that is not known here (a part of a GPU, say).

    Args:
        uuids: All GPUs, in NVML's order. CUDA's is another one where there are several models, unless
            ``CUDA_DEVICE_ORDER=PCI_BUS_ID``: an index may mean another GPU then.
        visible: ``CUDA_VISIBLE_DEVICES``: indices, UUIDs or how these begin, with commas between; ``None`` = not set.
    """
    if visible is None:
        return tuple(uuids)
    chosen: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        if not entry or entry.startswith("-"):  # CUDA reads no further
            break
        named = uuids[int(entry) :][:1] if entry.isdecimal() else [uuid for uuid in uuids if uuid.startswith(entry)]
        if len(named) != 1:
            return tuple(uuids)
        chosen += named
    return tuple(chosen)


def find_held(used: Mapping[str, int], before: Mapping[str, int], *, tolerance_bytes: float) -> dict[str, int]:
    """Return the GPUs that have more memory in use than before, beyond the tolerance, and how many bytes more."""
    more = {gpu: num_bytes - before.get(gpu, num_bytes) for gpu, num_bytes in used.items()}
    return {gpu: num_bytes for gpu, num_bytes in more.items() if num_bytes > tolerance_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReclaimed:
    """The wait for GPU memory is over, whatever came of it; for the agent's mailbox."""

    waited_s: float = 0.0
    is_last: bool = False
    """No start waits for it any more: it cannot be read."""


class MemoryReclaim:
    """Hold a node's workers back until the GPU memory of those before them is free.

    What others have in use is no reason to wait: it is read before the first workers. What stays in use when a wait
    ends counts as theirs from then on, so that no memory is waited for twice.

    Args:
        config: For how long, how much may stay in use, how often it is looked at.
        deliver: Called in a thread of this when a wait is over.

    Thread: the agent's main thread; owns one, which has a probe process, on a node with visible GPUs.
    """

    def __init__(self, config: FaultToleranceConfig, deliver: Callable[[MemoryReclaimed], None]) -> None:
        self._config, self._deliver = config, deliver
        self._visible = env.environ().get("CUDA_VISIBLE_DEVICES")
        self.waited_s = 0.0
        """How long the newest wait took; 0 = there was none."""
        can_wait = config.gpu_memory_reclaim_timeout > 0 and bool(choose_gpus(("any",), self._visible)) and has_gpus()
        self.is_awaited = can_wait
        """No worker starts until the next :class:`MemoryReclaimed` was taken."""
        self._is_looking = False
        self._prober, self._closed = Prober(), threading.Event()
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outlast-gpu-memory", daemon=True) if can_wait else None
        if self._thread is not None:
            self._thread.start()

    def begin(self) -> None:
        """Begin to wait, now that nothing is left of the workers; nothing happens if no wait is due. Blocks: never."""
        if self.is_awaited and not self._is_looking:
            self._is_looking = True
            self._asked.put(True)

    def take(self, over: MemoryReclaimed) -> None:
        """Take what was delivered."""
        self.is_awaited = self._is_looking = False
        self.waited_s = over.waited_s
        if over.is_last:
            self._thread = None

    def note_started(self) -> None:
        """Note that workers start: the next ones wait for their memory."""
        self.is_awaited = self._thread is not None

    def abandon(self) -> None:
        """End the probe process. Blocks: never."""
        self._prober.abandon()

    def close(self) -> None:
        """End the wait that is under way, thread and process. Idempotent. Blocks: hardly, at most 3 s."""
        self._closed.set()
        self._asked.put(False)
        self._prober.abandon()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        # The probe process ends with this thread: the kernel sees to it.
        try:
            with self._prober:
                in_use, timeout_s = self._read(), 0.0  # at once, so that the process is there once it is needed
                if in_use is None:
                    return
                while self._asked.get():
                    in_use, waited_s = self._wait(in_use, timeout_s)
                    self._deliver(MemoryReclaimed(waited_s=waited_s if timeout_s else 0.0))
                    timeout_s = self._config.gpu_memory_reclaim_timeout  # no workers were there before the first
        finally:
            self._deliver(MemoryReclaimed(is_last=True))  # whatever ended this: no start waits for it

    def _wait(self, before: dict[str, int], timeout_s: float) -> tuple[dict[str, int], float]:
        """Wait until no GPU has more memory in use than before.

        Returns:
            What counts as in use by others from now on, and the seconds that it took.

        Blocks: up to ``timeout_s`` and one reading; hardly, once this is closed.
        """
        began_s, tolerance_bytes = clock.now_s(), self._config.gpu_memory_tolerance_mb * 2**20
        while True:
            used = self._read()
            waited_s = clock.now_s() - began_s
            if used is None or self._closed.is_set():
                return before, waited_s
            held = find_held(used, before, tolerance_bytes=tolerance_bytes)
            left_s = timeout_s - waited_s
            if not held or left_s <= 0:
                break
            self._closed.wait(min(self._config.gpu_memory_poll_interval, left_s))
        if held and timeout_s:
            log.warning(
                "GPU memory was not released within %.1f s: %s more in use than before the workers; the next workers "
                "start nevertheless (--ft-gpu-memory-reclaim-timeout, --ft-gpu-memory-tolerance-mb)",
                waited_s,
                ", ".join(f"{gpu} has {num_bytes / 2**30:.2f} GiB" for gpu, num_bytes in held.items()),
            )
        elif timeout_s and waited_s > _NOTICEABLE_S:
            log.info("the GPU memory of the previous workers was released after %.1f s", waited_s)
        by_others = {gpu: num if gpu in held else min(num, before.get(gpu, num)) for gpu, num in used.items()}
        return {**before, **by_others}, waited_s

    def _read(self) -> dict[str, int] | None:
        """Return the bytes in use of each visible GPU that gives them; ``None``: they cannot be read, as was logged."""
        found = self._prober.ask(DeviceMemoryUse(), "memory use", "GPUs", timeout_s=_READ_S)
        if found.status != Status.OK:
            self._log_unknown(found)
            return None
        used: dict[str, int | None] = found.facts["used_bytes"]
        chosen = choose_gpus(tuple(used), self._visible)
        return {gpu: num_bytes for gpu in chosen if (num_bytes := used[gpu]) is not None}

    def _log_unknown(self, found: CheckResult) -> None:
        if not self._closed.is_set():
            level = logging.INFO if found.status == Status.SKIPPED else logging.WARNING
            log.log(level, "workers start without a wait for GPU memory: %s", found.reason)
