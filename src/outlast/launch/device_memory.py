"""GPU memory of killed workers: the next workers of this node start once it is free again.

A process can be gone before the driver has released its memory; workers that start meanwhile find too little of it. The
memory in use is read before the first workers start, and after each cycle's end until it is back at that level. The
wait is bounded, as another program may use the memory.

A probe process reads it through NVML, without torch and without a GPU context, so that a hung driver blocks nothing
else. It stays for later readings, which take milliseconds. A node without GPUs has neither thread nor process for this.
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
from outlast.health.probing import Prober, Status

log = logging.getLogger(__name__)
_READ_S = 30.0
"""Limit for one reading: the first one may have to wake the driver."""
_NOTICEABLE_S = 1.0
_CLOSE_S = 3.0


def choose_gpus(uuids: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """Return the GPUs that workers can see; all if an entry is not known here (a part of a GPU, for example).

    Args:
        uuids: All GPUs, in NVML's order. CUDA's order differs where there are several models, unless
            ``CUDA_DEVICE_ORDER=PCI_BUS_ID``: an index may then mean another GPU.
        visible: ``CUDA_VISIBLE_DEVICES``: indices, UUIDs or prefixes of UUIDs; ``None``: not set.
    """
    if visible is None:
        return tuple(uuids)
    chosen: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        if not entry or entry.startswith("-"):  # CUDA ignores the rest
            break
        named = uuids[int(entry) :][:1] if entry.isdecimal() else [uuid for uuid in uuids if uuid.startswith(entry)]
        if len(named) != 1:
            return tuple(uuids)
        chosen += named
    return tuple(chosen)


def find_held(used: Mapping[str, int], before: Mapping[str, int], *, tolerance_bytes: float) -> dict[str, int]:
    """Return the GPUs whose memory in use has grown beyond the tolerance, and by how many bytes."""
    more = {gpu: num_bytes - before.get(gpu, num_bytes) for gpu, num_bytes in used.items()}
    return {gpu: num_bytes for gpu, num_bytes in more.items() if num_bytes > tolerance_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReclaimed:
    """The wait for GPU memory is over, with whatever result; for the agent's mailbox."""

    waited_s: float = 0.0
    is_last: bool = False
    """No later start waits: the memory cannot be read."""


class MemoryReclaim:
    """Delay a node's workers until the GPU memory of the previous ones is free.

    Memory of other programs, read before the first workers, does not delay them. Memory that stays in use when a wait
    ends is attributed to other programs from then on, so that it is waited for only once.

    Thread: the agent's main thread; owns one with a probe process on a node with visible GPUs, which calls ``deliver``.
    """

    def __init__(self, config: FaultToleranceConfig, deliver: Callable[[MemoryReclaimed], None]) -> None:
        self._config, self._deliver = config, deliver
        self._visible = env.environ().get("CUDA_VISIBLE_DEVICES")
        self.waited_s = 0.0
        """Duration of the newest wait; 0: there was none."""
        can_wait = config.gpu_memory_reclaim_timeout > 0 and bool(choose_gpus(("any",), self._visible)) and has_gpus()
        self.is_awaited = can_wait
        """No worker may start until the next :class:`MemoryReclaimed` was taken."""
        self._is_looking = False
        self._prober, self._closed = Prober(), threading.Event()
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outlast-gpu-memory", daemon=True) if can_wait else None
        if self._thread is not None:
            self._thread.start()

    def begin(self) -> None:
        """Begin to wait, once the previous workers are gone; does nothing if no wait is due. Blocks: never."""
        if self.is_awaited and not self._is_looking:
            self._is_looking = True
            self._asked.put(True)

    def take(self, over: MemoryReclaimed) -> None:
        """Note the end of a wait."""
        self.is_awaited = self._is_looking = False
        self.waited_s = over.waited_s
        if over.is_last:
            self._thread = None

    def note_started(self) -> None:
        """Note that workers start: the next ones must wait for their memory."""
        self.is_awaited = self._thread is not None

    def abandon(self) -> None:
        """End the probe process. Blocks: never."""
        self._prober.abandon()

    def close(self) -> None:
        """End the current wait, the thread and the process. Idempotent. Blocks: at most 3 s."""
        self._closed.set()
        self._asked.put(False)
        self._prober.abandon()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        # The kernel ends the probe process with this thread.
        try:
            with self._prober:
                in_use, timeout_s = self._read(), 0.0  # at once, so that the process exists when it is needed
                if in_use is None:
                    return
                while self._asked.get():
                    in_use, waited_s = self._wait(in_use, timeout_s)
                    self._deliver(MemoryReclaimed(waited_s=waited_s if timeout_s else 0.0))
                    timeout_s = self._config.gpu_memory_reclaim_timeout  # there were no workers before the first start
        finally:
            self._deliver(MemoryReclaimed(is_last=True))  # however this ended, no start waits for it

    def _wait(self, before: dict[str, int], timeout_s: float) -> tuple[dict[str, int], float]:
        """Wait until no GPU has more memory in use than before.

        Returns:
            The memory attributed to other programs from now on, and the duration of the wait.

        Blocks: up to ``timeout_s`` and one reading; hardly once this object is closed.
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
        """Return the bytes in use of each visible GPU; ``None``: they cannot be read, which is logged."""
        found = self._prober.ask(DeviceMemoryUse(), "memory use", "GPUs", timeout_s=_READ_S)
        if found.status != Status.OK:
            if not self._closed.is_set():
                level = logging.INFO if found.status == Status.SKIPPED else logging.WARNING
                log.log(level, "workers start without a wait for GPU memory: %s", found.reason)
            return None
        used: dict[str, int | None] = found.facts["used_bytes"]
        chosen = choose_gpus(tuple(used), self._visible)
        return {gpu: num_bytes for gpu in chosen if (num_bytes := used[gpu]) is not None}
