"""Messages between ranks, their monitor processes and the hub; msgpack, never pickle.

* Between a rank and its monitor process: a ``SOCK_SEQPACKET`` pair, one message a packet. The rank sends
  :class:`Connect` once, then what it reports (:data:`~outlast.policy.restart_orders.Report`); it receives
  :class:`Listening` first, then orders. Beside them it is told who could host the hub (:class:`Candidates`), so that it
  can start another monitor process where its first one is gone (:class:`Reconnect`).
* Between monitor processes and the hub: :mod:`outlast.inprocess.link`.

Nothing here imports torch.
"""

from __future__ import annotations

import msgspec

from outlast.decoding import msgpack_decoder
from outlast.errors import OutlastError
from outlast.policy.restart_orders import (
    Abort,
    Assign,
    Assigned,
    Candidate,
    Completed,
    Expel,
    Fault,
    FaultKind,
    Finish,
    Go,
    Left,
    MemberFacts,
    Order,
    Ready,
    Report,
    Restart,
    Standing,
)

__all__ = [
    "MAX_PACKET_BYTES",
    "Abort",
    "Assign",
    "Assigned",
    "Beat",
    "Candidate",
    "Candidates",
    "Completed",
    "Connect",
    "Expel",
    "Fault",
    "FaultKind",
    "Finish",
    "FromMonitor",
    "FromRank",
    "Go",
    "Gone",
    "Join",
    "Left",
    "Listening",
    "MemberFacts",
    "MemberPlace",
    "NotHub",
    "OnLink",
    "Order",
    "Ready",
    "Reconnect",
    "Report",
    "Restart",
    "Standing",
    "decode_from_monitor",
    "decode_from_rank",
    "decode_on_link",
    "encode",
]

MAX_PACKET_BYTES = 1 << 20


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The monitor process runs, and could host the hub at this address."""

    address: str
    """``host port``."""


class MemberPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a living member's process is."""

    node: str
    space: str
    """Names the machine and the name space in which ``pid`` means something."""
    pid: int
    address: str
    """``host port`` where its monitor process listens."""
    labels: dict[str, str] = {}
    """What the rank says of its place beyond its node."""


class Candidates(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who may host the hub, in this order; the first one does. Also the answer to a :class:`Join`."""

    candidates: tuple[Candidate, ...]
    members: dict[int, MemberPlace] = {}
    """Living members by initial rank; empty before the first :class:`Go`."""


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Join the hub; who is told its own address hosts it."""

    hub: str
    """``host port``."""
    token: str
    """The secret of this group of monitor processes; hexadecimal digits."""


class Reconnect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Join the hub in place of a monitor process that is gone."""

    token: str
    known: Candidates
    standing: Standing
    last_words: Left | None = None
    """What may not have reached the hub."""


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message on a link: who comes, and that it knows the secret."""

    token: str
    initial_rank: int
    initial_world_size: int
    place: MemberPlace
    """Of the rank's process."""
    life: str
    """Names the monitor process."""
    wants: str = ""
    """Life of the monitor process that it believes to talk to; empty: any."""
    standing: Standing = Standing()
    labels: dict[str, str] = {}
    """What the rank says of its place beyond its node."""


class NotHub(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer of a monitor process that hosts no hub (yet)."""

    life: str
    candidates: tuple[Candidate, ...] = ()
    """As far as it knows."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sign of life."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank's process is gone."""

    fault: Fault


FromRank = Connect | Reconnect | Report
FromMonitor = Listening | Candidates | Order
OnLink = Join | NotHub | Candidates | Beat | Gone | Report | Order

_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgpack_decoder(FromRank)
_from_monitor: msgspec.msgpack.Decoder[FromMonitor] = msgpack_decoder(FromMonitor)
_on_link: msgspec.msgpack.Decoder[OnLink] = msgpack_decoder(OnLink)


def encode(message: FromRank | FromMonitor | OnLink) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode_from_rank(data: bytes) -> FromRank:
    """Return what a rank told its monitor process.

    Raises:
        OutlastError: It is none of ours.
    """
    try:
        return _from_rank.decode(data)
    except msgspec.DecodeError as error:
        raise OutlastError(f"unreadable message from a rank to its monitor process: {error}") from error


def decode_from_monitor(data: bytes) -> FromMonitor:
    """Return what a monitor process told its rank.

    Raises:
        OutlastError: It is none of ours.
    """
    try:
        return _from_monitor.decode(data)
    except msgspec.DecodeError as error:
        raise OutlastError(f"unreadable message from a monitor process to its rank: {error}") from error


def decode_on_link(data: bytes | bytearray | memoryview) -> OnLink:
    """Return what came over a link.

    Raises:
        OutlastError: It is none of ours.
    """
    try:
        return _on_link.decode(data)
    except msgspec.DecodeError as error:
        raise OutlastError(f"unreadable message between monitor processes: {error}") from error
