"""The heartbeat memory of a node: the state of its workers, in shared memory.

One mapping per node and cycle: a header page, then one page per local rank, written through :class:`RankPage` and read
through :class:`Board`. A worker writes its own page with aligned 8-byte stores: no system call, no lock, nothing that
can block training. The page outlives the worker, for the post-mortem. All times are ``CLOCK_MONOTONIC`` nanoseconds.

A *sequence lock* protects the stack of open sections: the writer increments the last of these words, makes the update,
and sets the first to the same number; a reader copies all of them and retries, a bounded number of times, while the two
differ. If the writer was stopped or killed in an update, the result is marked ``RankState.torn``. Readers that act on a
result read twice, which also covers machines that reorder stores.

A process with in-process restarts also writes an :class:`InProcessMark`, which outlives every attached monitor. Each
change sends the agent a datagram with the faults behind it, which may be lost; the words on the page cannot.

Rejected: a ``multiprocessing.shared_memory`` block (its resource tracker removes it too early), a socket per rank
(several microseconds a heartbeat, and it can block), ctypes structures (three times slower).
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

import msgspec

from outlast.clock import now_ns
from outlast.errors import ConfigError, OutlastError
from outlast.incidents import IncidentKind
from outlast.policy.deadlines import BoardSection, RankFacts
from outlast.policy.durability import Durability
from outlast.policy.inprocess_protocol import InProcessState
from outlast.policy.recovery_point import Tier
from outlast.runtime.files import memory_file, memory_files

log = logging.getLogger(__name__)
_MEMORY_NAME = "outlast-board"

MAX_DEPTH = 8
"""Number of nested open sections that are recorded; deeper ones are only counted."""
MAX_NAMES = 32
"""Section names of one worker that have a slot; all others share :data:`OTHER`."""
OTHER = "(other)"
"""The name for all section names after the first :data:`MAX_NAMES`."""
PAGE_BYTES = 8192

MAGIC = int.from_bytes(b"OUTLBRD1", "little")
VERSION = 7
# Words of the header page.
H_MAGIC, H_VERSION, H_RANKS, H_TOKEN = range(4)
# Words of a rank's page.
DONE, PID, RANK, CYCLE, ATTACHED, FINISHED, ITERATION, DURABLE, REPORTS, RESTORED = range(10)
LAST_HEARTBEAT, FIRST_HEARTBEAT, NUM_HEARTBEATS, LONGEST_GAP, COLLECTIVES, REQUESTED = range(10, 16)
DEPTH, ENTRIES, ENTRIES_AT_ITERATION, LEFT, LONGEST_OUTSIDE, NUM_NAMES, LEAVING, PROMISES = range(16, 24)
STACK = 24  # MAX_DEPTH x (name | ordinal << 8, start)
BEGUN = STACK + 2 * MAX_DEPTH
HOT_WORDS = BEGUN + 1
NAMES = HOT_WORDS  # (MAX_NAMES + 1) x (NAME_WORDS of text, longest, count)
NAME_WORDS = 5
SLOT_WORDS = NAME_WORDS + 2
MAX_NAME_BYTES = 8 * NAME_WORDS - 1
# Which checkpoint was loaded; written before RESTORED is set.
LOAD_CHECKPOINT = NAMES + SLOT_WORDS * (MAX_NAMES + 1)
LOAD_TIER, LOAD_WINDOW, LOAD_ATTEMPT = range(LOAD_CHECKPOINT + 1, LOAD_CHECKPOINT + 4)
ATTEMPT_WORDS = 32
MAX_ATTEMPT_BYTES = 8 * ATTEMPT_WORDS - 1
# Iterations committed in any tier and in a tier that survives the loss of a node (DURABLE survives the end of the job);
# when DURABLE was committed, and its iteration then; the save that is due in the durable tier, and since when.
COMMITTED = LOAD_ATTEMPT + ATTEMPT_WORDS
COMMITTED_NODE, DURABLE_AT, DURABLE_AT_ITERATION, OWED_ITERATION, OWED_SINCE = range(COMMITTED + 1, COMMITTED + 6)
# In-process restart state, written by :class:`InProcessMark`. It belongs to the process and outlives each attachment.
IN_PROCESS = OWED_SINCE + 1
IN_PROCESS_RESTART_COUNT, IN_PROCESS_CALL, IN_PROCESS_SINCE, IN_PROCESS_PATIENCE = range(IN_PROCESS + 1, IN_PROCESS + 5)
# Settings of the worker's own config, as text; the length is written last.
SETTINGS_LENGTH = IN_PROCESS_PATIENCE + 1
# Failures that the session protects against, as text; the length is written last.
PROTECTION_LENGTH = SETTINGS_LENGTH + 1
PROTECTION = PROTECTION_LENGTH + 1
PROTECTION_WORDS = 64
MAX_PROTECTION_BYTES = 8 * PROTECTION_WORDS
# Timeouts that the worker calculated, as text; the length is written last, but the text may change during a read.
TIMEOUTS_LENGTH = PROTECTION + PROTECTION_WORDS
TIMEOUTS = TIMEOUTS_LENGTH + 1
TIMEOUTS_WORDS = 256
MAX_TIMEOUTS_BYTES = 8 * TIMEOUTS_WORDS
SETTINGS = TIMEOUTS + TIMEOUTS_WORDS
PAGE_WORDS = PAGE_BYTES // 8
MAX_SETTINGS_BYTES = 8 * (PAGE_WORDS - SETTINGS)
HOT = struct.Struct(f"={HOT_WORDS}q")
PAGE = struct.Struct(f"={PAGE_WORDS}q")
_PROGRESS = (ITERATION, DURABLE, REPORTS, RESTORED, *range(LOAD_CHECKPOINT, IN_PROCESS))
"""Words that outlive an attachment."""
_MAX_FAULTS = 8
_MAX_SUMMARY = 500
_encoder = msgspec.msgpack.Encoder()
_get_ident = threading.get_ident


class EndRequest(IntEnum):
    """A worker's request to its launcher, for the case that a worker fails."""

    NONE = 0
    REPLACE_NODE = 1
    """Give this node's slot to a spare."""
    STOP = 2
    """Restart no worker."""


_REQUESTS = frozenset(EndRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCopy:
    """The checkpoint copy that the ranks loaded at the start of a cycle."""

    checkpoint: int
    attempt: str
    """The attempt that saved it."""
    tier: Tier
    """The tier by which the load of all ranks is judged."""
    suspect_window: int
    """Iterations after the checkpoint in which an invalid result makes the copy suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDurability:
    """Commits of this cycle that a worker of the next cycle needs. Times are monotonic nanoseconds."""

    durable_at_ns: int = 0
    """When the newest checkpoint that survives the end of the job was committed, or loaded if an earlier job committed
    it; 0 = there is none."""
    durable_iteration: int = -1
    """Iteration of that checkpoint."""
    owed_iteration: int = 0
    """Iteration of the oldest save that is due in the tier that outlives the job."""
    owed_since_ns: int = 0
    """When that save began; 0 = none is due."""


class RankPage:
    """The writing side of one rank's page.

    Thread: sections belong to the thread that called :meth:`attach`; sections of other threads are not recorded (logged
    once). :meth:`heartbeat` and the single-word setters: any.
    """

    __slots__ = (
        "_counts",
        "_entries",
        "_gap",
        "_heartbeat",
        "_left",
        "_longest",
        "_names",
        "_num_heartbeats",
        "_outside",
        "_owner",
        "_seq",
        "_stack",
        "_warmup",
        "_warned",
        "_words",
        "local_rank",
    )  # fmt: skip

    def __init__(self, words: memoryview, local_rank: int) -> None:
        self.local_rank = local_rank
        self._words = words
        self._warned: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._seq = 0
        self._stack: list[tuple[int, int, int]] = []  # (name, start, ordinal)
        self._names: dict[str, int] = {}
        self._longest = [0] * (MAX_NAMES + 1)
        self._counts = [0] * (MAX_NAMES + 1)  # closed
        self._entries = [0] * (MAX_NAMES + 1)  # opened
        self._warmup = [0] * (MAX_NAMES + 1)
        self._owner = _get_ident()
        self._heartbeat = self._gap = self._num_heartbeats = self._left = self._outside = 0

    def attach(
        self, *, pid: int, global_rank: int, cycle: int, warmup: Mapping[str, int] | None = None, settings: str = ""
    ) -> None:
        """Claim the page for this process and thread, and clear the records of earlier monitors.

        Training progress (iterations, the newest checkpoint, the loaded copy) is kept for the whole cycle: a checkpoint
        manager may have written it before the first monitor attached, and the agent may read it only after an
        in-process restart, when the next call has attached already.

        Args:
            warmup: Section name to the number of first durations that do not count as its longest.
            settings: Settings of this worker's own config, for the agent; a text that is too long is logged instead.
        """
        words = self._words
        for at in set(range(IN_PROCESS)).difference(_PROGRESS):
            words[at] = 0
        self._reset()
        words[SETTINGS_LENGTH] = words[PROTECTION_LENGTH] = words[TIMEOUTS_LENGTH] = 0
        words[PID], words[RANK], words[CYCLE] = pid, global_rank, cycle
        words[COLLECTIVES] = -1
        for name, count in (warmup or {}).items():
            self._warmup[self.intern(name)] = count
        text = settings.encode()
        if len(text) <= MAX_SETTINGS_BYTES:
            _put_text(words, SETTINGS, text, SETTINGS_LENGTH)
        else:
            self._warn_once(
                "settings",
                f"the fault tolerance settings have {len(text)} bytes, more than the {MAX_SETTINGS_BYTES} that are "
                "handed to the agent, which does not use them; give them to outlast run, by --config",
            )
        words[ATTACHED] = now_ns()

    def set_protection(self, text: str) -> None:
        """Report which failures the session protects against; a text that is too long is cut."""
        _put_text(self._words, PROTECTION, text.encode()[:MAX_PROTECTION_BYTES], PROTECTION_LENGTH)

    def set_timeouts(self, text: str) -> None:
        """Report the timeouts that this worker calculated; they take precedence over those of every config.

        Raises: ConfigError: The text is longer than :data:`MAX_TIMEOUTS_BYTES`.
        """
        data = text.encode()
        if len(data) > MAX_TIMEOUTS_BYTES:
            raise ConfigError(
                f"the calculated timeouts have {len(data)} bytes, more than the {MAX_TIMEOUTS_BYTES} that can be "
                "enforced; calculate those of fewer sections"
            )
        _put_text(self._words, TIMEOUTS, data, TIMEOUTS_LENGTH)

    # -- hot path ------------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        now = now_ns()
        words, last = self._words, self._heartbeat
        self._heartbeat = words[LAST_HEARTBEAT] = now
        if last:
            gap = now - last
            if gap > self._gap:
                self._gap = words[LONGEST_GAP] = gap
        else:
            words[FIRST_HEARTBEAT] = now
        self._num_heartbeats = words[NUM_HEARTBEATS] = self._num_heartbeats + 1

    def open(self, index: int) -> None:
        """Enter the section whose name was interned as ``index``."""
        if _get_ident() != self._owner:
            self._warn_once(
                "foreign",
                f"section {self._name(index)!r} is opened by thread {threading.current_thread().name!r}, "
                "not by the thread that attached to the heartbeat memory: sections of other threads are not monitored",
            )
            return
        now = now_ns()
        words, stack, entries = self._words, self._stack, self._entries
        depth = len(stack)
        ordinal = entries[index]
        entries[index] = ordinal + 1
        stack.append((index, now, ordinal))
        words[BEGUN] = seq = self._seq + 1
        if depth < MAX_DEPTH:
            words[STACK + 2 * depth] = index | ordinal << 8
            words[STACK + 1 + 2 * depth] = now
        else:
            self._warn_once(
                "deep", f"section {self._name(index)!r} lies deeper than {MAX_DEPTH} sections: measured, not watched"
            )
        words[DEPTH] = depth + 1
        words[ENTRIES] += 1
        words[DONE] = self._seq = seq
        if not depth and (left := self._left) and now - left > self._outside:
            self._outside = words[LONGEST_OUTSIDE] = now - left

    def shut(self, index: int) -> None:
        """Leave the innermost open section of this name, if there is one."""
        if _get_ident() != self._owner:
            return
        stack = self._stack
        at = len(stack) - 1
        while at >= 0 and stack[at][0] != index:
            at -= 1
        if at < 0:
            return
        now = now_ns()
        words = self._words
        _, start, ordinal = stack.pop(at)
        depth = len(stack)
        words[BEGUN] = seq = self._seq + 1
        if at < depth:  # not the innermost one: those inside move up
            for level, (name, begun, nth) in enumerate(stack[at:MAX_DEPTH], at):
                words[STACK + 2 * level] = name | nth << 8
                words[STACK + 1 + 2 * level] = begun
        words[DEPTH] = depth
        if not depth:
            self._left = words[LEFT] = now
        words[DONE] = self._seq = seq
        slot = NAMES + NAME_WORDS + SLOT_WORDS * index
        self._counts[index] = words[slot + 1] = self._counts[index] + 1
        if now - start > self._longest[index] and ordinal >= self._warmup[index]:
            self._longest[index] = words[slot] = now - start

    # -- names ---------------------------------------------------------------------------------------------

    def intern(self, name: str) -> int:
        """Return the number of a section name, for :meth:`open` and :meth:`shut`.

        Raises: ConfigError: The name is empty or longer than 39 bytes.
        """
        if (index := self._names.get(name)) is not None:
            return index
        text = name.encode()
        if not 0 < len(text) <= MAX_NAME_BYTES or b"\0" in text:
            raise ConfigError(f"section name {name!r} must have 1 to {MAX_NAME_BYTES} bytes; shorten it")
        index = self._words[NUM_NAMES]
        if index >= MAX_NAMES:
            self._warn_once(
                "names", f"more than {MAX_NAMES} section names; {name!r} and later ones are watched as {OTHER!r}"
            )
            index, text = MAX_NAMES, OTHER.encode()
        _put_text(self._words, NAMES + SLOT_WORDS * index, text)
        if index < MAX_NAMES:
            self._words[NUM_NAMES] = index + 1
        self._names[name] = index
        return index

    def enter(self, name: str) -> None:
        self.open(self.intern(name))

    def leave(self, name: str | None = None) -> bool:
        """Leave the innermost section, or the innermost one of this name; return whether one was open."""
        stack = self._stack
        if _get_ident() != self._owner or not stack:
            return False
        index = stack[-1][0] if name is None else self._names.get(name, -1)
        if stack[-1][0] != index and all(entry[0] != index for entry in stack):
            return False
        self.shut(index)
        return True

    def _name(self, index: int) -> str:
        return next((name for name, number in self._names.items() if number == index), OTHER)

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", text)

    # -- facts ---------------------------------------------------------------------------------------------

    def set_iteration(self, iteration: int) -> None:
        if iteration != self._words[ITERATION]:
            self._words[ENTRIES_AT_ITERATION] = self._words[ENTRIES]
            self._words[ITERATION] = iteration

    def set_durable_iteration(self, iteration: int) -> None:
        """Record that a checkpoint of this iteration survives the end of the job; a lower one changes nothing."""
        self.set_durability(Durability(iteration, iteration, iteration))

    def set_durability(self, known: Durability) -> None:
        """Record the newest checkpoints that survive each failure; lower iterations than before change nothing."""
        words = self._words
        for at, iteration in ((COMMITTED, known.worker), (COMMITTED_NODE, known.node), (DURABLE, known.job)):
            if iteration is not None and iteration > words[at]:
                words[at] = iteration
        if words[DURABLE] > words[DURABLE_AT_ITERATION]:
            words[DURABLE_AT], words[DURABLE_AT_ITERATION] = now_ns(), words[DURABLE]
        words[REPORTS] = 1

    def set_owed(self, owed: tuple[int, int] | None) -> None:
        """Record the oldest save that is due in the tier that outlives the job.

        Args:
            owed: Its iteration, and the monotonic nanoseconds at which it began; ``None`` = none is due.
        """
        self._words[OWED_ITERATION], self._words[OWED_SINCE] = owed or (0, 0)

    @property
    def owed(self) -> tuple[int, int] | None:
        """The value of :meth:`set_owed`, of this cycle of the job or an earlier one."""
        since_ns = self._words[OWED_SINCE]
        return (self._words[OWED_ITERATION], since_ns) if since_ns > 0 else None

    def report_progress(self) -> None:
        """Announce that this worker will report durable checkpoints, though there is none yet."""
        self._words[REPORTS] = 1

    def set_restored(self, loaded: LoadedCopy | None = None) -> None:
        """Record that this worker loaded a checkpoint in this cycle, and which one, if known."""
        words = self._words
        if loaded is not None:
            attempt = loaded.attempt.encode()
            if len(attempt) > MAX_ATTEMPT_BYTES:
                self._warn_once(
                    "attempt", f"attempt {loaded.attempt!r} has a name too long to be judged by its results"
                )
            else:
                _put_text(words, LOAD_ATTEMPT, attempt.ljust(8 * ATTEMPT_WORDS, b"\0"))
                words[LOAD_CHECKPOINT], words[LOAD_WINDOW] = loaded.checkpoint, loaded.suspect_window
                words[LOAD_TIER] = loaded.tier + 1
        words[RESTORED] = 1

    def promise_heartbeats(self, promised: bool) -> None:
        """Record whether this worker sends heartbeats as long as it is healthy."""
        self._words[PROMISES] = int(promised)

    def set_leaving(self, exit_code: int) -> None:
        """Announce the exit code, not 0, with which this process is about to exit."""
        self._words[LEAVING] = exit_code

    def request(self, wanted: EndRequest) -> None:
        """Request an action of the launcher for the case that a worker fails."""
        self._words[REQUESTED] = wanted

    def set_collectives(self, count: int) -> None:
        """Record how many collectives this rank has entered; -1 = not known."""
        self._words[COLLECTIVES] = count

    def finish(self) -> None:
        """Record that this rank is done: no timeout is enforced on it any more."""
        if not self._words[FINISHED]:
            if self._left and not self._stack:
                self._words[LONGEST_OUTSIDE] = self._outside = max(self._outside, now_ns() - self._left)
            self._words[FINISHED] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState(RankFacts):
    """A snapshot of one worker's page. Times are monotonic nanoseconds of the node; 0 = never."""

    cycle: int = 0
    durable_iteration: int | None = None
    """Highest iteration whose checkpoint survives the end of the job."""
    committed_iteration: int | None = None
    """Highest iteration that is committed in any tier."""
    node_durable_iteration: int | None = None
    """Highest iteration whose checkpoint survives the loss of a node."""
    kept: KeptDurability = KeptDurability()
    """State that the next cycle of the job continues from."""
    reports_progress: bool = False
    """``durable_iteration`` is valid, even while it is ``None``."""
    restored: bool = False
    """The worker loaded a checkpoint in this cycle."""
    loaded: LoadedCopy | None = None
    """The loaded copy, if known."""
    leaving_with: int = 0
    """Announced exit code; 0 = none."""
    requested: EndRequest = EndRequest.NONE
    num_heartbeats: int = 0
    num_entries: int = 0
    num_entries_in_iteration: int = 0
    """Sections entered since the iteration changed."""
    collectives: int = -1
    """Collectives entered, as of the last examination; -1 = not known."""
    longest_s: Mapping[str, float] = field(default_factory=dict)
    """Longest duration of each closed section; ``""`` stands for the time outside all sections."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of closings per section."""
    initial_heartbeat_s: float = 0.0
    """Seconds from the attachment to the first heartbeat; 0 = none yet."""
    longest_heartbeat_gap_s: float = 0.0
    torn: bool = False
    """The writer stopped in the middle of an update; sections may be inconsistent."""

    @property
    def reports_iteration(self) -> bool:
        """Whether ``iteration`` is valid: a monitor is attached, or a checkpoint manager writes to the page."""
        return self.attached or self.reports_progress

    @property
    def standing(self) -> str:
        """One word for the state of the worker; ``starting``: no session yet."""
        if self.finished:
            return "finished"
        inside = {InProcessState.RESTARTING: "restarting", InProcessState.SPARE: "spare"}
        begun = self.attached or self.in_process != InProcessState.OFF
        return inside.get(self.in_process, "running" if begun else "starting")


class Board:
    """The pages of a node's workers; created by the agent, opened by the workers.

    Use :meth:`create` or :meth:`open`.
    """

    def __init__(self, path: str, fd: int, num_ranks: int, *, is_written: bool = True) -> None:
        self.path = path
        """Path at which other processes of the node open the memory."""
        self.num_ranks = num_ranks
        self.fd = -1
        """Descriptor, in the process that created the memory; -1 elsewhere."""
        access = mmap.ACCESS_WRITE if is_written else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, PAGE_BYTES * (num_ranks + 1), access=access)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, *, num_ranks: int = 1, kept: Sequence[KeptDurability] = ()) -> Board:
        """Create a heartbeat memory without a file, so none can be left behind; it exists as long as its users.

        Other processes of the user open it at :attr:`path` while this process lives, or inherit its descriptor.

        Args:
            kept: State of the pages of the previous cycle, by local rank.
        """
        fd = memory_file(_MEMORY_NAME)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES * (num_ranks + 1))  # without memory: fail now, not with SIGBUS later
            board = cls(f"/proc/{os.getpid()}/fd/{fd}", fd, num_ranks)
        except BaseException:
            os.close(fd)
            raise
        board.fd = fd
        words = board._words
        for local_rank in range(num_ranks):
            page = board.page(local_rank)
            for at in (RANK, COLLECTIVES, DURABLE, COMMITTED, COMMITTED_NODE):
                page[at] = -1
            before = kept[local_rank] if local_rank < len(kept) else KeptDurability()
            page[DURABLE_AT], page[DURABLE_AT_ITERATION] = before.durable_at_ns, before.durable_iteration
            page[OWED_ITERATION], page[OWED_SINCE] = before.owed_iteration, before.owed_since_ns
        words[H_VERSION], words[H_RANKS] = VERSION, num_ranks
        words[H_TOKEN] = secrets.randbits(62)
        words[H_MAGIC] = MAGIC
        return board

    @classmethod
    def open(cls, path: str, *, is_written: bool = True) -> Board:
        """Open a heartbeat memory that another process created.

        Args:
            is_written: This process is one of its workers; otherwise it only reads.

        Raises: OutlastError: There is none, or it has another format or size.
        """
        try:
            fd = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise OutlastError(f"heartbeat memory {path} cannot be opened: {error}") from error
        try:
            size = os.fstat(fd).st_size
            header = os.pread(fd, 24, 0)
            if len(header) < 24:
                raise OutlastError(f"{path} is not a heartbeat memory file: it has {size} bytes")
            magic, version, num_ranks = struct.unpack("=3q", header)
            if magic != MAGIC:
                raise OutlastError(f"{path} is not a heartbeat memory file: its first bytes are {header[:8]!r}")
            if version != VERSION:
                raise OutlastError(
                    f"heartbeat memory {path} has format {version}, but this outlast reads {VERSION}; "
                    "agent and workers must use the same outlast"
                )
            if num_ranks < 1 or size != PAGE_BYTES * (num_ranks + 1):
                raise OutlastError(f"heartbeat memory {path} has {size} bytes, which does not fit {num_ranks} ranks")
            return cls(path, fd, num_ranks, is_written=is_written)
        finally:
            os.close(fd)

    @property
    def token(self) -> int:
        """A random number that identifies this memory."""
        return self._words[H_TOKEN]

    def page(self, local_rank: int) -> memoryview:
        """Return the words of a rank's page. Raises: OutlastError: There is no such rank."""
        if not 0 <= local_rank < self.num_ranks:
            raise OutlastError(
                f"heartbeat memory {self.path} has {self.num_ranks} ranks, but not local rank {local_rank}"
            )
        return self._words[PAGE_WORDS * (local_rank + 1) : PAGE_WORDS * (local_rank + 2)]

    def rank(self, local_rank: int) -> RankPage:
        """Return the writing side of a rank's page; for that worker only. Raises: as :meth:`page`."""
        return RankPage(self.page(local_rank), local_rank)

    def assign(self, local_rank: int, *, pid: int, global_rank: int, cycle: int) -> None:
        """Record the owner of a page before it attaches, so that a worker that never attaches can be examined."""
        words = self.page(local_rank)
        if not words[ATTACHED]:
            words[RANK], words[CYCLE], words[PID] = global_rank, cycle, pid

    def settings(self, local_rank: int) -> str | None:
        """Return the settings of an attached worker's own config, empty if none; ``None`` while it has not attached."""
        page = self.page(local_rank)
        if not page[ATTACHED]:
            return None
        return _text(page, SETTINGS, page[SETTINGS_LENGTH], MAX_SETTINGS_BYTES)

    def protection(self, local_rank: int) -> str:
        """Return the failures that a worker's session protects against; empty until a session has written them."""
        page = self.page(local_rank)
        return _text(page, PROTECTION, page[PROTECTION_LENGTH], MAX_PROTECTION_BYTES)

    def timeouts(self, local_rank: int) -> str | None:
        """Return the timeouts that a worker calculated, empty if none; ``None``: they are being changed."""
        page = self.page(local_rank)
        first, again = (_text(page, TIMEOUTS, page[TIMEOUTS_LENGTH], MAX_TIMEOUTS_BYTES) for _ in range(2))
        return first if first == again else None

    def retire(self, local_rank: int) -> None:
        """Record that the worker of a rank ended normally: no timeout is enforced on it any more."""
        self.page(local_rank)[FINISHED] = 1

    def read(self, local_rank: int) -> RankState:
        """Return a consistent snapshot of a rank's page.

        Blocks: at most about 10 ms, when the writer was stopped or killed in the middle of an update.
        """
        page = self.page(local_rank)
        hot = page[:HOT_WORDS]
        for attempt in range(60):
            words = HOT.unpack(bytes(hot))
            if torn := words[DONE] != words[BEGUN]:
                if attempt >= 40:  # the writer was preempted and needs a processor
                    time.sleep(0.0005)
                continue
            break
        # Names and durations are single words; a name is written before the sections that use it, durations after them.
        whole = bytes(page)
        return _decode(local_rank, words + PAGE.unpack(whole)[HOT_WORDS:], whole, torn=torn)

    def read_all(self) -> list[RankState]:
        return [self.read(local_rank) for local_rank in range(self.num_ranks)]

    def close(self) -> None:
        """Free the mapping; idempotent. Pages returned before must not be used afterwards."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with suppress(BufferError):  # pages are still in use; the mapping is freed with the last of them
            self._words.release()
            self._map.close()


def _put_text(words: memoryview, at: int, text: bytes, length_at: int | None = None) -> None:
    """Write a text, padded to whole words, from the word ``at``; its length is 0 until all of it is written."""
    padded = text + bytes(-len(text) % 8)
    if length_at is not None:
        words[length_at] = 0
    words[at : at + len(padded) // 8].cast("B")[:] = padded
    if length_at is not None:
        words[length_at] = len(text)


def _text(page: memoryview, at: int, length: int, max_bytes: int) -> str:
    """Return a text whose length was written last; empty if the length is invalid."""
    return bytes(page[at:])[: length if 0 < length <= max_bytes else 0].decode(errors="replace")


def _decode(local_rank: int, words: tuple[int, ...], whole: bytes, *, torn: bool) -> RankState:
    num_names = min(max(words[NUM_NAMES], 0), MAX_NAMES)
    names: dict[int, str] = {}
    longest: dict[str, float] = {}
    counts: dict[str, int] = {}
    for index in (*range(num_names), MAX_NAMES):
        slot = NAMES + SLOT_WORDS * index
        text = whole[8 * slot : 8 * (slot + NAME_WORDS)].rstrip(b"\0")
        if not text:
            continue
        names[index] = name = text.decode(errors="replace")
        if count := words[slot + NAME_WORDS + 1]:
            counts[name] = count
        if took_ns := words[slot + NAME_WORDS]:
            longest[name] = took_ns / 1e9
    if outside_ns := words[LONGEST_OUTSIDE]:
        longest[""] = outside_ns / 1e9
    sections = []
    for depth in range(min(max(words[DEPTH], 0), MAX_DEPTH)):
        tag, start_ns = words[STACK + 2 * depth], words[STACK + 2 * depth + 1]
        if (tag & 0xFF) in names and start_ns > 0:
            sections.append(BoardSection(names[tag & 0xFF], start_ns, tag >> 8))
    first_heartbeat, attached, in_process = words[FIRST_HEARTBEAT], words[ATTACHED], words[IN_PROCESS]
    loaded = None
    if words[RESTORED] and 0 < words[LOAD_TIER] <= len(Tier):
        attempt = whole[8 * LOAD_ATTEMPT : 8 * (LOAD_ATTEMPT + ATTEMPT_WORDS)].rstrip(b"\0")
        loaded = LoadedCopy(
            checkpoint=words[LOAD_CHECKPOINT],
            attempt=attempt.decode(errors="replace"),
            tier=Tier(words[LOAD_TIER] - 1),
            suspect_window=words[LOAD_WINDOW],
        )
    return RankState(
        local_rank=local_rank,
        global_rank=words[RANK],
        pid=words[PID],
        cycle=words[CYCLE],
        attached=bool(attached),
        finished=bool(words[FINISHED]),
        iteration=words[ITERATION],
        durable_iteration=words[DURABLE] if words[DURABLE] >= 0 else None,
        committed_iteration=words[COMMITTED] if words[COMMITTED] >= 0 else None,
        node_durable_iteration=words[COMMITTED_NODE] if words[COMMITTED_NODE] >= 0 else None,
        kept=KeptDurability(
            durable_at_ns=words[DURABLE_AT],
            durable_iteration=words[DURABLE_AT_ITERATION],
            owed_iteration=words[OWED_ITERATION],
            owed_since_ns=words[OWED_SINCE],
        ),
        reports_progress=bool(words[REPORTS]),
        restored=bool(words[RESTORED]),
        loaded=loaded,
        leaving_with=words[LEAVING],
        requested=EndRequest(words[REQUESTED] if words[REQUESTED] in _REQUESTS else 0),
        attached_ns=attached,
        last_heartbeat_ns=words[LAST_HEARTBEAT],
        num_heartbeats=words[NUM_HEARTBEATS],
        promises_heartbeats=bool(words[PROMISES]),
        sections=tuple(sections),
        depth=max(words[DEPTH], 0),
        left_ns=words[LEFT],
        num_entries=words[ENTRIES],
        num_entries_in_iteration=max(0, words[ENTRIES] - words[ENTRIES_AT_ITERATION]),
        collectives=words[COLLECTIVES],
        longest_s=MappingProxyType(longest),
        counts=MappingProxyType(counts),
        initial_heartbeat_s=(first_heartbeat - attached) / 1e9 if first_heartbeat > attached else 0.0,
        longest_heartbeat_gap_s=words[LONGEST_GAP] / 1e9,
        in_process=InProcessState(in_process if 0 <= in_process < len(InProcessState) else InProcessState.OFF),
        in_process_call=words[IN_PROCESS_CALL],
        in_process_restart_count=words[IN_PROCESS_RESTART_COUNT],
        in_process_since_ns=words[IN_PROCESS_SINCE],
        in_process_patience_s=words[IN_PROCESS_PATIENCE] / 1e9,
        torn=torn,
    )


class InProcessFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault that made the ranks leave the wrapped function."""

    rank: int
    """Initial rank on which the fault was detected."""
    kind: IncidentKind
    summary: str = ""
    is_consequence: bool = False
    """Another rank's fault caused it."""


class MarkChanged(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's in-process mark changed."""

    local_rank: int
    call: int
    restart_count: int
    state: InProcessState
    faults: tuple[InProcessFault, ...] = ()
    iteration: int | None = None
    """Optimizer steps done at the time of the change, if the worker reports them. When the agent reads the page, it may
    show those of the next call."""


def agent_address(token: int) -> bytes:
    """Return the socket address at which the agent of the memory with this token receives changes."""
    return b"\0outlast-%016x-agent" % token


class InProcessMark:
    """The writing side of one process's in-process mark.

    Raises: OutlastError: There is no such memory, or no such rank in it. Thread: any, one at a time; no call blocks.
    """

    def __init__(self, path: str, local_rank: int) -> None:
        self._board, self._local_rank, self._pid = Board.open(path), local_rank, os.getpid()
        try:
            self._words = self._board.page(local_rank)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except BaseException:
            self._board.close()
            raise

    def arm(self, call: int, *, patience_s: float) -> None:
        """Record that a wrapped function is about to run.

        Args:
            call: Number of the process's call of a wrapped function, from 0.
            patience_s: Seconds after which the agent gives up a restart inside the processes that was not completed:
                the sum of the barrier's and the hard timeout.
        """
        self._words[IN_PROCESS_PATIENCE] = round(patience_s * 1e9)
        self._words[IN_PROCESS_CALL] = call
        self.set(InProcessState.SPARE, 0)

    def set(
        self, state: InProcessState, restart_count: int | None = None, faults: Sequence[InProcessFault] = ()
    ) -> None:
        """Record the in-process restart state of this process.

        Args:
            restart_count: The restart that this process is in, or begins; ``None``: unchanged.
        """
        if os.getpid() != self._pid:  # a forked child is not the worker
            return
        words = self._words
        if restart_count is not None:
            words[IN_PROCESS_RESTART_COUNT] = restart_count
        words[IN_PROCESS_SINCE] = now_ns()
        words[IN_PROCESS] = state
        change = MarkChanged(
            local_rank=self._local_rank,
            call=words[IN_PROCESS_CALL],
            restart_count=words[IN_PROCESS_RESTART_COUNT],
            state=state,
            faults=tuple(
                msgspec.structs.replace(fault, summary=fault.summary[:_MAX_SUMMARY]) for fault in faults[:_MAX_FAULTS]
            ),
            iteration=words[ITERATION] if words[ATTACHED] or words[REPORTS] else None,
        )
        try:
            self._socket.sendto(_encoder.encode(change), agent_address(self._board.token))
        except OSError as error:  # no receiver, or its buffer is full: the page has the state, too
            log.debug("the agent got no datagram that local rank %d is %s: %s", self._local_rank, state.name, error)

    def set_leaving(self, exit_code: int) -> None:
        """Announce the exit code, not 0, with which this process is about to exit."""
        self._words[LEAVING] = exit_code

    def close(self) -> None:
        """Release the memory; its content stays. Idempotent."""
        self._socket.close()
        self._words.release()
        self._board.close()


def held_pages(pid: int) -> list[RankState]:
    """Return the assigned pages of all heartbeat memories that an agent of this machine holds, oldest cycle first."""
    pages: list[RankState] = []
    for path in memory_files(pid, _MEMORY_NAME):
        with suppress(OutlastError):  # its cycle ended
            board = Board.open(path, is_written=False)
            pages += [page for page in board.read_all() if page.pid]
            board.close()
    return sorted(pages, key=lambda page: page.cycle)
