"""Entry point of the group ``torchrun.handlers`` for ``torchrun --rdzv-backend=outlast``.

torch loads all entry points of the group with its elastic part, which ``import torch.distributed.checkpoint`` imports;
outlast's modules are therefore imported only when a handler is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    from outlast.launch.torchrun_backend import OutlastRendezvous

    return OutlastRendezvous(params)
