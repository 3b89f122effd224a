"""What torch loads of the group ``torchrun.handlers``: ``torchrun --rdzv-backend=outlast``.

torch loads every entry point of the group when its elastic part is imported, which ``import
torch.distributed.checkpoint`` does. So nothing of ours is imported here until a handler is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torch calls to make a handler."""
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    from outlast.launch.torchrun_backend import OutlastRendezvous

    return OutlastRendezvous(params)
