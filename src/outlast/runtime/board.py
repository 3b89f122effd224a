"""The heartbeat board: what the workers of a node are doing, in shared memory.

One mapping per node and cycle: a header page, then one page per local rank. A worker writes its own page with
aligned 8-byte stores: no system call, no lock, and nothing that could block training; the page survives the
worker for the post-mortem. All times are ``CLOCK_MONOTONIC`` nanoseconds, one clock for a node's processes.

A *sequence lock* guards the few words that must agree (the stack of open sections). Its writer numbers an update
in the last of these words, makes it, and numbers it again in the first; a reader copies them all at once, and
when the two numbers differ it reads again, boundedly often, since a writer may have been stopped or killed in the
middle; it then takes what it sees and says so (``RankState.torn``). Readers that act on what they saw read twice,
which also covers machines that reorder stores.

Rejected: a ``multiprocessing.shared_memory`` block (its resource tracker removes it too early), a socket per
rank (several microseconds a heartbeat, and it can block), ctypes structures (three times slower).
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from outlast.errors import OutlastError
from outlast.policy.inprocess_protocol import InProcessState
from outlast.policy.recovery_point import Tier
from outlast.runtime import board_page as layout
from outlast.runtime.board_page import MAX_DEPTH, MAX_NAMES, OTHER, LoadedCopy, RankPage

__all__ = ["MAX_DEPTH", "MAX_NAMES", "OTHER", "Board", "BoardSection", "LoadedCopy", "RankPage", "RankState"]


@dataclass(frozen=True, slots=True)
class BoardSection:
    """A section that a worker is in."""

    name: str
    start_ns: int
    ordinal: int = 0
    """How many sections of this name the worker had entered before in this cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One worker's page at one moment. Times are monotonic nanoseconds of the node; 0 = never."""

    local_rank: int
    global_rank: int = -1
    """-1 = not known yet."""
    pid: int = 0
    cycle: int = 0
    attached: bool = False
    """The worker has a monitor; a plain script never does."""
    finished: bool = False
    iteration: int = 0
    durable_iteration: int | None = None
    """Highest iteration known to be saved for good."""
    reports_progress: bool = False
    """``durable_iteration`` means something, even while it is ``None``."""
    restored: bool = False
    """The worker loaded a checkpoint in this cycle."""
    loaded: LoadedCopy | None = None
    """Which one, where it said so."""
    leaving_with: int = 0
    """Exit code with which the worker said that it ends; 0 = it said nothing."""
    attached_ns: int = 0
    last_heartbeat_ns: int = 0
    num_heartbeats: int = 0
    promises_heartbeats: bool = False
    """As long as the worker is healthy, it sends them."""
    sections: tuple[BoardSection, ...] = ()
    """Open sections, outermost first, the first :data:`MAX_DEPTH`."""
    depth: int = 0
    """Number of open sections, also of those too deep to be recorded."""
    left_ns: int = 0
    """When the last outermost section was left."""
    num_entries: int = 0
    """Sections entered in this cycle."""
    num_entries_in_iteration: int = 0
    """Sections entered since the iteration changed."""
    collectives: int = -1
    """Collectives entered, as last asked for; -1 = never asked or not known."""
    longest_s: Mapping[str, float] = field(default_factory=dict)
    """Longest duration of each closed section; ``""`` stands for the time outside all sections."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How often each section was closed."""
    initial_heartbeat_s: float = 0.0
    """Seconds from the attachment to the first heartbeat; 0 = none yet."""
    longest_heartbeat_gap_s: float = 0.0
    in_process: InProcessState = InProcessState.OFF
    """How the worker stands with restarts inside its process."""
    in_process_call: int = 0
    """Which of the process's calls of a wrapped function that is about, from 0."""
    in_process_iteration: int = 0
    """The restart iteration that the worker is in, or goes to."""
    in_process_since_ns: int = 0
    """When one of these changed last."""
    in_process_patience_s: float = 0.0
    """Seconds that a restart inside the process may take; 0 = it was never armed."""
    torn: bool = False
    """The writer stopped in the middle of an update; sections may not fit together."""

    @property
    def reports_iteration(self) -> bool:
        """Whether ``iteration`` means something: a monitor is attached, or a checkpoint manager writes to the page."""
        return self.attached or self.reports_progress


class Board:
    """The pages of a node's workers; made by the agent, opened by the workers.

    Use :meth:`create`, :meth:`create_anonymous` or :meth:`open`.
    """

    def __init__(self, path: str, fd: int, num_ranks: int, *, owned: bool) -> None:
        self.path = path
        """Where other processes of the node open the board."""
        self.num_ranks = num_ranks
        self._owned = owned
        self._map = mmap.mmap(fd, layout.PAGE_BYTES * (num_ranks + 1))
        self._words = memoryview(self._map).cast("q")
        self._fd = -1

    @classmethod
    def create(cls, path: str, *, num_ranks: int) -> Board:
        """Make a board in a new file.

        Raises:
            OutlastError: The file exists, or its file system is full or read-only.
        """
        assert num_ranks >= 1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise OutlastError(f"heartbeat board {path} exists already; each cycle needs a new one") from None
        except OSError as error:
            raise OutlastError(f"heartbeat board {path} cannot be made: {error}") from error
        try:
            return cls._fill(path, fd, num_ranks)
        except OSError as error:
            os.unlink(path)
            raise OutlastError(f"heartbeat board {path} cannot be made: {error}; free some of its space") from error
        finally:
            os.close(fd)

    @classmethod
    def create_anonymous(cls, *, num_ranks: int = 1) -> Board:
        """Make a board without a file, which therefore cannot be left behind; it lives as long as its users.

        Other processes of the user open it at :attr:`path` while this one lives, or inherit its descriptor.
        """
        fd = os.memfd_create("outlast-board", os.MFD_CLOEXEC)
        try:
            board = cls._fill(f"/proc/{os.getpid()}/fd/{fd}", fd, num_ranks)
        except BaseException:
            os.close(fd)
            raise
        board._owned, board._fd = False, fd
        return board

    @classmethod
    def _fill(cls, path: str, fd: int, num_ranks: int) -> Board:
        # A full file system says so now, not by SIGBUS at some later store.
        os.posix_fallocate(fd, 0, layout.PAGE_BYTES * (num_ranks + 1))
        board = cls(path, fd, num_ranks, owned=True)
        words = board._words
        for local_rank in range(num_ranks):
            page = layout.PAGE_WORDS * (local_rank + 1)
            words[page + layout.RANK] = words[page + layout.DURABLE] = words[page + layout.COLLECTIVES] = -1
        words[layout.H_VERSION], words[layout.H_RANKS] = layout.VERSION, num_ranks
        words[layout.H_TOKEN] = secrets.randbits(62)
        words[layout.H_MAGIC] = layout.MAGIC
        return board

    @classmethod
    def open(cls, path: str) -> Board:
        """Open a board that another process made.

        Raises:
            OutlastError: There is none, or it is of another format or size.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise OutlastError(f"heartbeat board {path} cannot be opened: {error}") from error
        try:
            size = os.fstat(fd).st_size
            header = os.pread(fd, 24, 0)
            if len(header) < 24:
                raise OutlastError(f"heartbeat board {path} is no board: it has {size} bytes")
            magic, version, num_ranks = struct.unpack("=3q", header)
            if magic != layout.MAGIC:
                raise OutlastError(f"heartbeat board {path} is no board: its first bytes are {header[:8]!r}")
            if version != layout.VERSION:
                raise OutlastError(
                    f"heartbeat board {path} has format {version}, this outlast reads {layout.VERSION}; "
                    "agent and workers must use the same outlast"
                )
            if num_ranks < 1 or size != layout.PAGE_BYTES * (num_ranks + 1):
                raise OutlastError(f"heartbeat board {path} has {size} bytes, which does not fit {num_ranks} ranks")
            return cls(path, fd, num_ranks, owned=False)
        finally:
            os.close(fd)

    @property
    def token(self) -> int:
        """A number that tells this board from every other."""
        return self._words[layout.H_TOKEN]

    @property
    def fd(self) -> int:
        """Descriptor of an anonymous board; -1 for one with a file."""
        return self._fd

    def rank(self, local_rank: int) -> RankPage:
        """Return the writing side of a rank's page; for that worker only.

        Raises:
            OutlastError: The board has no such rank.
        """
        return RankPage(self._page(local_rank), local_rank)

    def assign(self, local_rank: int, *, pid: int, global_rank: int, cycle: int) -> None:
        """Note whose page it is before the worker attaches: one that never does can still be examined."""
        words = self._page(local_rank)
        if not words[layout.ATTACHED]:
            words[layout.RANK], words[layout.CYCLE], words[layout.PID] = global_rank, cycle, pid

    def settings(self, local_rank: int) -> str | None:
        """Return what an attached worker's own config sets, empty for nothing; ``None`` while it has not attached."""
        page = self._page(local_rank)
        if not page[layout.ATTACHED]:
            return None
        length = page[layout.SETTINGS_LENGTH]
        text = bytes(page[layout.SETTINGS :])[: length if 0 < length <= layout.MAX_SETTINGS_BYTES else 0]
        return text.decode(errors="replace")

    def protection(self, local_rank: int) -> str:
        """Return what a worker's session protects against; empty while no session has told."""
        page = self._page(local_rank)
        length = page[layout.PROTECTION_LENGTH]
        text = bytes(page[layout.PROTECTION : layout.PROTECTION + layout.PROTECTION_WORDS])
        return text[: length if 0 < length <= layout.MAX_PROTECTION_BYTES else 0].decode(errors="replace")

    def words_of(self, local_rank: int) -> memoryview:
        """Return the words of a rank's page, for :class:`outlast.runtime.in_process_mark.InProcessMark`.

        Raises:
            OutlastError: The board has no such rank.
        """
        return self._page(local_rank)

    def retire(self, local_rank: int) -> None:
        """Note that a rank whose worker ended is missed by nobody: nothing is enforced on it any more."""
        self._page(local_rank)[layout.FINISHED] = 1

    def _page(self, local_rank: int) -> memoryview:
        if not 0 <= local_rank < self.num_ranks:
            raise OutlastError(f"heartbeat board {self.path} has {self.num_ranks} ranks, none of number {local_rank}")
        return self._words[layout.PAGE_WORDS * (local_rank + 1) : layout.PAGE_WORDS * (local_rank + 2)]

    def read(self, local_rank: int) -> RankState:
        """Return a consistent snapshot of a rank's page.

        Blocks: at most about 10 ms, when the writer was stopped or killed in the middle of an update.
        """
        page = self._page(local_rank)
        hot = page[: layout.HOT_WORDS]
        for attempt in range(60):
            words = layout.HOT.unpack(bytes(hot))
            if torn := words[layout.DONE] != words[layout.BEGUN]:
                if attempt >= 40:  # the writer was preempted: it needs a processor, not another look
                    time.sleep(0.0005)
                continue
            break
        # Names and durations are single words, written before (a name) or after the sections that use them.
        rest = layout.PAGE.unpack(bytes(page))[layout.HOT_WORDS :]
        return _decode(local_rank, words + rest, torn=torn)

    def read_all(self) -> list[RankState]:
        """Return a snapshot of every rank, by local rank."""
        return [self.read(local_rank) for local_rank in range(self.num_ranks)]

    def close(self) -> None:
        """Let go of the mapping; idempotent. Pages handed out must not be used afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        try:
            self._words.release()
            self._map.close()
        except BufferError:  # pages are still held; the mapping goes with the last of them
            pass

    def unlink(self) -> None:
        """Remove the file, if this process made one; idempotent."""
        if self._owned:
            Path(self.path).unlink(missing_ok=True)


def _decode(local_rank: int, words: tuple[int, ...], *, torn: bool) -> RankState:
    num_names = min(max(words[layout.NUM_NAMES], 0), MAX_NAMES)
    names: dict[int, str] = {}
    longest: dict[str, float] = {}
    counts: dict[str, int] = {}
    for index in (*range(num_names), MAX_NAMES):
        slot = layout.NAMES + layout.SLOT_WORDS * index
        text = layout.NAME.pack(*words[slot : slot + layout.NAME_WORDS]).rstrip(b"\0")
        if not text:
            continue
        names[index] = name = text.decode(errors="replace")
        if count := words[slot + layout.NAME_WORDS + 1]:
            counts[name] = count
        if took_ns := words[slot + layout.NAME_WORDS]:
            longest[name] = took_ns / 1e9
    if outside_ns := words[layout.LONGEST_OUTSIDE]:
        longest[""] = outside_ns / 1e9
    sections = []
    for depth in range(min(max(words[layout.DEPTH], 0), MAX_DEPTH)):
        tag, start_ns = words[layout.STACK + 2 * depth], words[layout.STACK + 2 * depth + 1]
        if (tag & 0xFF) in names and start_ns > 0:
            sections.append(BoardSection(names[tag & 0xFF], start_ns, tag >> 8))
    first_beat, attached = words[layout.FIRST_BEAT], words[layout.ATTACHED]
    return RankState(
        local_rank=local_rank,
        global_rank=words[layout.RANK],
        pid=words[layout.PID],
        cycle=words[layout.CYCLE],
        attached=bool(attached),
        finished=bool(words[layout.FINISHED]),
        iteration=words[layout.ITERATION],
        durable_iteration=words[layout.DURABLE] if words[layout.DURABLE] >= 0 else None,
        reports_progress=bool(words[layout.REPORTS]),
        restored=bool(words[layout.RESTORED]),
        loaded=_decode_loaded(words),
        leaving_with=words[layout.LEAVING],
        attached_ns=attached,
        last_heartbeat_ns=words[layout.BEAT],
        num_heartbeats=words[layout.NUM_BEATS],
        promises_heartbeats=bool(words[layout.PROMISES]),
        sections=tuple(sections),
        depth=max(words[layout.DEPTH], 0),
        left_ns=words[layout.LEFT],
        num_entries=words[layout.ENTRIES],
        num_entries_in_iteration=max(0, words[layout.ENTRIES] - words[layout.ENTRIES_AT_ITERATION]),
        collectives=words[layout.COLLECTIVES],
        longest_s=MappingProxyType(longest),
        counts=MappingProxyType(counts),
        initial_heartbeat_s=(first_beat - attached) / 1e9 if first_beat > attached else 0.0,
        longest_heartbeat_gap_s=words[layout.LONGEST_GAP] / 1e9,
        in_process=_decode_in_process(words[layout.IN_PROCESS]),
        in_process_call=words[layout.IN_PROCESS_CALL],
        in_process_iteration=words[layout.IN_PROCESS_ITERATION],
        in_process_since_ns=words[layout.IN_PROCESS_SINCE],
        in_process_patience_s=words[layout.IN_PROCESS_PATIENCE] / 1e9,
        torn=torn,
    )


def _decode_in_process(word: int) -> InProcessState:
    return InProcessState(word) if 0 <= word < len(InProcessState) else InProcessState.OFF


def _decode_loaded(words: tuple[int, ...]) -> LoadedCopy | None:
    if not words[layout.RESTORED] or not 0 < words[layout.LOAD_TIER] <= len(Tier):
        return None
    text = layout.ATTEMPT.pack(*words[layout.LOAD_ATTEMPT : layout.LOAD_ATTEMPT + layout.ATTEMPT_WORDS])
    return LoadedCopy(
        generation=words[layout.LOAD_GENERATION],
        attempt=text.rstrip(b"\0").decode(errors="replace"),
        tier=Tier(words[layout.LOAD_TIER] - 1),
        suspect_window=words[layout.LOAD_WINDOW],
    )
