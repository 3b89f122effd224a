"""Examination of a node's ranks when a hang is reported, before any process is killed: the examiner and the responders.

Each worker has a responder: a thread that reports that its interpreter runs, the number of collectives it has entered,
and the collective it waits in. Ranks that wait in a collective are blocked in C with the GIL released, so the thread
can respond. A live process that does not respond holds the GIL or is stopped, which is evidence in itself. Queries are
datagrams on an abstract Unix socket, which leaves no file behind. The pending collective takes longer to determine, and
may have to wait for the device: it follows in a second datagram.

Each process group of torch counts its collectives. Torch's flight recorder knows the pending ones: in torch 2.13 it
records gloo's and NCCL's from the start, in earlier versions NCCL's only, and it may be off
(``TORCH_FR_BUFFER_SIZE=0``). Without it the function of ``torch.distributed`` on the stack is used. Nothing here
imports torch: a process without torch has entered no collective.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from outlast.decoding import json_decoder
from outlast.monitor import stacks
from outlast.monitor.stacks import Stack
from outlast.policy.deadlines import Expired
from outlast.policy.root_cause import Collective, Position
from outlast.runtime.board import Board, RankState
from outlast.runtime.files import make_private_folder, open_private, write_optional
from outlast.runtime.processes import DatagramSocket, process_state

log = logging.getLogger(__name__)

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_SAME_SHAPE = frozenset({"ALLREDUCE", "BROADCAST"})
"""Collectives with the same sizes on every rank; others may differ."""


class Books(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process's own records of its collectives; sent to the examiner as JSON."""

    groups: dict[str, int] = {}
    recorded: bool = False
    """The flight recorder has this process's collectives: without ``pending`` none is under way."""
    pending: Collective | None = None
    """The oldest collective that has not ended."""


class _RecordedCollective(msgspec.Struct):
    profiling_name: str = ""
    process_group: tuple[str, str] = ("", "")
    pg_id: int = -1
    collective_seq_id: int = -1
    p2p_seq_id: int = -1
    is_p2p: bool = False
    retired: bool = True
    input_sizes: list[list[int]] = []
    thread_id: str = ""


class _GroupProgress(msgspec.Struct):
    last_completed_collective: str = "-1"


class _Trace(msgspec.Struct):
    entries: list[_RecordedCollective] = []
    pg_status: dict[str, _GroupProgress] = {}


_trace_decoder = json_decoder(_Trace)


def count_collectives() -> int:
    """Return the number of collectives that this process has entered, over all its groups; -1: unknown."""
    groups = _count_by_group()
    return -1 if groups is None else sum(groups.values())


def read_books(thread: int | None = None) -> Books:
    """Return the records of this process.

    Args:
        thread: Identity of the thread that trains; ``None``: the main thread.

    Blocks: up to a tenth of a second, while the recorder writes its 2,000 entries.
    """
    groups = _count_by_group() or {}
    entries = _recorded(groups)
    if entries is None:
        return Books(groups=groups)
    ident = str(threading.main_thread().ident if thread is None else thread)
    pending = next((one for one in entries if one.thread_id == ident), entries[0] if entries else None)
    return Books(groups=groups, recorded=True, pending=None if pending is None else _collective(pending))


def waits_in(stack: Stack, books: Books | None) -> tuple[bool | None, Collective | None]:
    """Return whether a rank waits for others, and in which collective; from its stack and its records, if any."""
    waits = stack.waits_in_collective
    if stack.is_in_agreement:
        return waits, Collective(op="an agreement of outlast", is_own=True)
    if books is not None and books.recorded:
        if books.pending is not None:
            return waits is not False, books.pending
        # A backward pass computes as well, and a checkpoint's code writes files.
        return (False if waits and stack.collective is None else waits), None
    if not waits or stack.collective is None:
        return waits, None
    counts = list(books.groups.values()) if books is not None else []
    return waits, Collective(op=_plain(stack.collective), seq=counts[0] if len(counts) == 1 else -1)


def _count_by_group() -> dict[str, int] | None:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return None
    counts = {}
    for group in list(c10d._world.pg_map):
        try:
            counts[str(group.group_name)] = max(
                group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types
            )
        except (RuntimeError, ValueError, AttributeError) as error:  # a backend without sequence numbers
            log.debug("collectives of group %s are not known: %s", group, error)
            return None
    return counts


def _recorded(groups: dict[str, int]) -> list[_RecordedCollective] | None:
    """Return the collectives of these groups that are under way, oldest first; ``None``: none are recorded."""
    bindings: Any = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    found: list[_RecordedCollective] | None = None
    for name in _RECORDERS:
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        try:
            trace = _trace_decoder.decode(dump(includeCollectives=True, onlyActive=True))
        except (RuntimeError, TypeError, msgspec.DecodeError) as error:  # an unknown format
            log.debug("torch's flight recorder cannot be read: %s", error)
            continue
        ended = {group: int(status.last_completed_collective) for group, status in trace.pg_status.items()}
        known = [one for one in trace.entries if one.process_group[0] in groups]
        if known:
            found = (found or []) + [
                one
                for one in known
                if not one.retired and (one.is_p2p or one.collective_seq_id > ended.get(str(one.pg_id), -1))
            ]
    return found


def _collective(entry: _RecordedCollective) -> Collective:
    name, description = entry.process_group
    op = _plain(entry.profiling_name.rpartition(":")[2])
    label = f"{name} ({description})" if description not in ("", "undefined") else name
    return Collective(
        op=op,
        seq=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        group=name,
        label="" if description == "default_pg" else label,
        shape=str(entry.input_sizes) if op in _SAME_SHAPE and not entry.is_p2p else "",
        is_p2p=entry.is_p2p,
    )


def _plain(name: str) -> str:
    return name.replace("_", "").upper()


QUESTION = struct.Struct("<Q")
ANSWER = struct.Struct("<QIq")
"""The query's number, the local rank, the number of collectives (-1: unknown); in the second datagram followed by the
process's :class:`~outlast.monitor.examination.Books` as JSON."""


def address(token: int, local_rank: int) -> bytes:
    """Return the address of the responder of a rank of the heartbeat memory with this token."""
    return b"\0outlast-%016x-%d" % (token, local_rank)


class Responder:
    """A thread that responds to examiners, and watches the line to the duty of this rank.

    It is a daemon thread, since a script need not close its monitor; it blocks in one poll and never spins.

    Args:
        token: Of the heartbeat memory.
        local_rank: This rank.
        record: Called with every new count of collectives.
        line: A descriptor that becomes readable when the duty ends; -1: there is none.
        on_line_end: Called from the thread then; returns whether the line has another duty now.

    Raises:
        OSError: Another process responds for this rank already.
    """

    def __init__(
        self,
        token: int,
        local_rank: int,
        *,
        record: Callable[[int], None],
        line: int = -1,
        on_line_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._local_rank = local_rank
        self._record = record
        self._line, self._on_line_end = line, on_line_end
        self._socket = DatagramSocket(address(token, local_rank), QUESTION.size + 1)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="outlast-responder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._socket.close()
            os.close(self._wake)
            self._wake = -1

    def _run(self) -> None:
        try:
            poll = select.poll()
            for descriptor in (self._socket.fileno(), self._wake, self._line):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._wake in ready:
                    return
                if self._line in ready and not self._on_line_end():
                    poll.unregister(self._line)
                    self._line = -1
                if self._socket.fileno() in ready:
                    self._answer()
        except Exception:
            log.exception("the thread that reports this rank's stacks failed: the cause of a hang may not be found")

    def _answer(self) -> None:
        for question, sender in self._socket.receive():
            if len(question) != QUESTION.size or not sender:
                continue
            count = count_collectives()
            self._record(count)
            answer = ANSWER.pack(*QUESTION.unpack(question), self._local_rank, count)
            try:
                self._socket.send(answer, sender)
                self._socket.send(answer + msgspec.json.encode(read_books(stacks.followed())), sender)
            except OSError as error:  # the examiner is gone, or its buffer is full
                log.debug("an examiner received no response: %s", error)


ANSWER_S = 1.0
"""Time limit in seconds for a rank's response; a healthy rank is slow on a machine that swaps or lacks cores."""
DUMP_S = 2.0
"""Seconds that a rank has to write its stacks."""
BOOKS_S = 2.0
"""Time limit in seconds for the collective that a rank waits in, where every rank of the node responds."""
_LOOK_S = 0.003
_MAX_ANSWER = 1 << 16
_books_decoder = json_decoder(Books)


@dataclass(slots=True)
class _ExaminedRank:
    state: RankState
    process_state: str
    dump: stacks.Dump | None = None
    woken: bool = False
    complete: bool = False
    responsive: bool = True
    answered: bool = False
    collectives: int = -1
    books: Books | None = None


def examine(
    board: Board, *, node: str, stacks_dir: str | os.PathLike[str] | None, expired: Iterable[Expired] = ()
) -> list[Position]:
    """Examine every rank of a node: its process, its stacks, its collectives.

    No process is ended. A stopped process is continued just long enough to write its stacks, once the others have
    reported their collectives, and is stopped again.

    Args:
        board: The node's heartbeat memory; ranks without a process are left out.
        node: Name of the node.
        stacks_dir: Folder for each rank's stacks, as ``rank-<global rank>.txt``; ``None``: they are not written.
        expired: Timeouts that were exceeded.

    Blocks: about 0.1 s when every rank responds, about 1 s when one does not, three seconds at most; where py-spy is
    installed, one second more for each rank that could not write its stacks.
    """
    # Before a process is signalled: afterwards its state shows the signal.
    ranks = [_ExaminedRank(state, process_state(state.pid)) for state in board.read_all() if state.pid > 0]
    living = [rank for rank in ranks if not rank.state.finished and rank.process_state not in ("Z", "X")]
    started = time.monotonic()
    for rank in living:
        rank.responsive = rank.process_state not in ("T", "t")
    with _Answers(board, [rank for rank in living if rank.state.attached and rank.responsive]) as answers:
        for rank in living:
            rank.dump = stacks.Dump(rank.state.pid)
            if rank.process_state != "t":  # a debugger holds it
                rank.dump.request()
        try:
            _collect(living, answers, started)
        finally:
            for rank in living:
                if rank.woken and not rank.complete:
                    _send(rank.state.pid, signal.SIGSTOP)
    late = {one.local_rank for one in expired}
    return [_position(rank, node, late, stacks_dir) for rank in ranks]


def _collect(ranks: list[_ExaminedRank], answers: _Answers, started: float) -> None:
    is_distinguishable = not all(rank.responsive for rank in ranks)
    stopped = [rank for rank in ranks if rank.process_state == "T" and rank.dump is not None and rank.dump.requested]
    dump_s = DUMP_S
    while True:
        for rank in ranks:
            if rank.dump is not None and rank.dump.requested and not rank.complete and rank.dump.is_complete():
                rank.complete = True
                if rank.woken:
                    _send(rank.state.pid, signal.SIGSTOP)
        waited_s = time.monotonic() - started
        dumping = [rank for rank in ranks if rank.dump and rank.dump.requested and not rank.complete]
        missing = [rank for rank in answers.asked.values() if not rank.answered]
        # A process that is continued resumes its work, and others with it: they report first where they wait.
        others_have_responded = not missing and all(rank.process_state == "T" for rank in dumping)
        if stopped and (others_have_responded or waited_s >= ANSWER_S):
            for rank in stopped:
                rank.woken = _send(rank.state.pid, signal.SIGCONT)
            stopped, dump_s = [], waited_s + DUMP_S
        answer_s = ANSWER_S if missing else BOOKS_S
        asking = missing or (not is_distinguishable and any(rank.books is None for rank in answers.asked.values()))
        is_dumping = dumping and waited_s < dump_s
        if not is_dumping and not (asking and waited_s < answer_s):
            break
        answers.receive(_LOOK_S if is_dumping else answer_s - waited_s)
    for rank in missing:
        rank.responsive = False


class _Answers:
    def __init__(self, board: Board, ranks: list[_ExaminedRank]) -> None:
        self.asked = {rank.state.local_rank: rank for rank in ranks}
        self._number = secrets.randbits(63)
        self._socket = DatagramSocket(b"\0outlast-examiner-%016x" % self._number, _MAX_ANSWER)
        for local_rank in self.asked:
            try:
                self._socket.send(QUESTION.pack(self._number), address(board.token, local_rank))
            except OSError as error:  # gone, or too busy to have read the last queries
                log.debug("rank %d could not be queried: %s", local_rank, error)

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def receive(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1e3):
            return
        for answer, _ in self._socket.receive():
            if len(answer) < ANSWER.size:
                continue
            number, local_rank, count = ANSWER.unpack_from(answer)
            if number != self._number or (rank := self.asked.get(local_rank)) is None:
                continue
            if not rank.answered:
                rank.answered, rank.collectives = True, count
            if len(answer) > ANSWER.size:
                try:
                    rank.books = _books_decoder.decode(answer[ANSWER.size :])
                except msgspec.DecodeError as error:
                    log.debug("the report of rank %d about its collectives cannot be read: %s", local_rank, error)
                    rank.books = Books()


def _position(rank: _ExaminedRank, node: str, late: set[int], stacks_dir: str | os.PathLike[str] | None) -> Position:
    state = rank.state
    text = rank.dump.text() if rank.dump is not None else ""
    stack = stacks.parse(text)
    if rank.dump is not None and not stack.frames and (seen := stacks.py_spy(state.pid, timeout_s=1.0)):
        text, stack = text + seen, stacks.parse(seen)
    waits, collective = waits_in(stack, rank.books)
    position = Position(
        node=node,
        global_rank=state.global_rank,
        pid=state.pid,
        iteration=state.iteration,
        sections=tuple(section.name for section in state.sections),
        num_entries=state.num_entries_in_iteration,
        collectives=rank.collectives,
        groups={} if rank.books is None else rank.books.groups,
        waiting_in=collective,
        responsive=rank.responsive,
        process_state=rank.process_state,
        stack_line=stack.line,
        waits_in_collective=waits,
        expired=state.local_rank in late,
        attached=state.attached,
        finished=state.finished,
    )
    if text and stacks_dir is not None:
        _write(Path(stacks_dir) / f"rank-{state.global_rank}.txt", position, text)
    return position


def _write(path: Path, position: Position, text: str) -> None:
    where = "/".join(position.sections) or "no section"
    head = (
        f"rank {position.global_rank} (node {position.node}, pid {position.pid}), "
        f"iteration {position.iteration}, in {where}, process state {position.process_state}"
        f"{'' if position.responsive else ', its interpreter did not respond'}\n\n"
    )

    def keep() -> None:
        make_private_folder(path.parent)
        with open(path, "w", opener=open_private) as file:
            file.write(head + stacks.arrange(text))

    write_optional("stacks of hung workers", path, keep)  # must not delay the recovery


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
