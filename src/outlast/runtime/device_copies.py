"""Copies between a device and the host, in a stream separate from training's.

Importing the module does not import torch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from outlast.runtime.device import in_background, is_capturing, is_done

if TYPE_CHECKING:
    import torch
    import torch.profiler

log = logging.getLogger(__name__)
_COPIES_TOGETHER = 32
"""Copies per call of torch, each of which releases the GIL; the device starts with the first ones meanwhile."""
_PORTABLE = 1
"""cudaHostRegisterPortable: for all GPUs of this process."""
_LEFT_FREE = 20
""":meth:`DeviceCopies.make_room` leaves one part in so many of a device's memory free."""
_ALIGNED = 512
"""Alignment in bytes of tensors within one allocation, as in the allocator's own."""


class Copied:
    """A sequence of queued copies.

    Args:
        mark: Event behind the last of them.
        sources: Tensors being copied, kept alive until then, as their memory would be reused.
    """

    def __init__(self, mark: torch.cuda.Event, sources: list[torch.Tensor]) -> None:
        self._mark, self._sources = mark, sources
        self._is_done = False

    def wait(self, timeout_s: float) -> bool:
        """Return whether the copies are done. Blocks: until they are, up to ``timeout_s``. Thread: any."""
        if not self._is_done and is_done(self._mark, timeout_s=timeout_s):
            self._is_done, self._sources = True, []
        return self._is_done

    def hold_back(self, timeout_s: float) -> bool:
        """Order the device's further work in its current stream behind these copies.

        Returns:
            Whether that holds; ``False``: a graph is being captured, and the copies were not done in time.

        Blocks: never; during a graph capture until they are done, up to ``timeout_s``. Thread: training's.
        """
        import torch

        if self._is_done:
            return True
        if is_capturing():
            return self.wait(timeout_s)  # captured work runs later and repeatedly, without this dependency
        torch.cuda.current_stream(self._mark.device).wait_event(self._mark)
        return True


class DeviceCopies:
    """Copies between one device and the host, in a stream of their own, concurrent with the device's work.

    Thread: any, for each call; copies queued by several threads are made one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        with in_background(device):
            self._stream = torch.cuda.Stream(device)

    def pin(self, address: int, num_bytes: int) -> bool:
        """Register memory of this process for direct copies; :meth:`unpin` it before it is unmapped.

        Returns:
            Whether it was registered; otherwise copies go through memory of the driver and wait for it.

        Blocks: some 0.1 s per GiB, longer if the kernel has not provided the pages yet.
        """
        import torch

        with in_background(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
            if code:
                self._forget_error()
                log.warning("%.1f GiB cannot be pinned (CUDA error %d): copies are slower", num_bytes / 2**30, code)
        return code == 0

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin`. Blocks: until the device copies nothing there any more."""
        import torch

        with in_background(self.device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                self._forget_error()

    def note_work(self) -> torch.cuda.Event:
        """Return an event behind the device's work so far in this thread's current stream."""
        import torch

        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def queue(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        behind: torch.cuda.Event | Copied | None = None,
        launch: Callable[[int], object] | None = None,
    ) -> Copied:
        """Queue copies to the host, to the device, or within it.

        Args:
            pairs: Source and target of each copy. Iterated here, so the device work that produces a source runs in the
                copies' stream.
            behind: What the copies must follow: an event of :meth:`note_work`, or other copies; ``None`` = only the
                copies queued here before.
            launch: Queues other work first; gets the handle of the copies' stream.

        Blocks: hardly if the host's memory is pinned; else while the copies are made.
        """
        import torch

        with in_background(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            if isinstance(behind, Copied):
                behind.hold_back(0.0)
            elif behind is not None:
                self._stream.wait_event(behind)
            if launch is not None:
                launch(self._stream.cuda_stream)
            remaining, sources = iter(pairs), list[torch.Tensor]()
            while some := list(itertools.islice(remaining, _COPIES_TOGETHER)):
                torch._foreach_copy_([target for _, target in some], [source for source, _ in some], non_blocking=True)
                sources += [source for source, _ in some]
            mark = torch.cuda.Event()
            mark.record(self._stream)
        return Copied(mark, sources)

    def make_room(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], *, together: bool = False
    ) -> list[torch.Tensor]:
        """Return new device tensors for copies: the first of these shapes that fit, with some memory left free.

        Args:
            together: In one allocation, which is freed once none of them is in use.

        Thread: training's.
        """
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        cached_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        spare_bytes, places, end = free_bytes + cached_bytes - total_bytes // _LEFT_FREE, list[slice](), 0
        for shape, dtype in shapes:
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            if end > spare_bytes:
                break
            places.append(slice(begin, end))
        fitting = list(zip(shapes, places, strict=False))
        tensors: list[torch.Tensor] = []
        with contextlib.suppress(torch.OutOfMemoryError):  # the cached memory is fragmented
            if together and fitting:
                piece = torch.empty(places[-1].stop, dtype=torch.uint8, device=self.device)
                tensors = [piece[place].view(dtype).view(shape) for (shape, dtype), place in fitting]
            else:
                for (shape, dtype), _ in fitting:
                    tensors.append(torch.empty(shape, dtype=dtype, device=self.device))
        # The memory may have belonged to tensors that queued kernels still use.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return tensors

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return new pinned host memory, as bytes."""
        import torch

        with in_background(self.device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _forget_error(self) -> None:
        """Clear the error of a refused call: the runtime keeps it and would report it at the next kernel launch."""
        import torch

        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)


@cache
def copies_of(device: torch.device) -> DeviceCopies | None:
    """Return the copies of a device; ``None``: it shares the host's memory, or its streams are not supported."""
    return DeviceCopies(device) if device.type == "cuda" else None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes in one dimension: a view if they are stored in order, else a copy."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
