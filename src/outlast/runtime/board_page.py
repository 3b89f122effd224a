"""One rank's page of the heartbeat board: its words, and the side that a worker writes.

See :mod:`outlast.runtime.board` for the whole and for the reading side.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from outlast.clock import now_ns
from outlast.errors import ConfigError
from outlast.policy.recovery_point import Tier

__all__ = ["MAX_DEPTH", "MAX_NAMES", "OTHER", "LoadedCopy", "RankPage"]

log = logging.getLogger(__name__)

MAX_DEPTH = 8
"""Open sections that are recorded; deeper ones are only counted."""
MAX_NAMES = 32
"""Section names of one worker with a slot of their own; further ones share :data:`OTHER`."""
OTHER = "(other)"
"""Stands for every section name beyond the first :data:`MAX_NAMES`."""
PAGE_BYTES = 8192

MAGIC = int.from_bytes(b"OUTLBRD1", "little")
VERSION = 5
# Words of the header page.
H_MAGIC, H_VERSION, H_RANKS, H_TOKEN = range(4)
# Words of a rank's page.
DONE, PID, RANK, CYCLE, ATTACHED, FINISHED, ITERATION, DURABLE, REPORTS, RESTORED = range(10)
BEAT, FIRST_BEAT, NUM_BEATS, LONGEST_GAP, COLLECTIVES = range(10, 15)
DEPTH, ENTRIES, ENTRIES_AT_ITERATION, LEFT, LONGEST_OUTSIDE, NUM_NAMES, LEAVING, PROMISES = range(16, 24)
STACK = 24  # MAX_DEPTH x (name | ordinal << 8, start)
BEGUN = STACK + 2 * MAX_DEPTH
HOT_WORDS = BEGUN + 1
NAMES = HOT_WORDS  # (MAX_NAMES + 1) x (NAME_WORDS of text, longest, count)
NAME_WORDS = 5
SLOT_WORDS = NAME_WORDS + 2
MAX_NAME_BYTES = 8 * NAME_WORDS - 1
# What was loaded: written before RESTORED says so.
LOAD_GENERATION = NAMES + SLOT_WORDS * (MAX_NAMES + 1)
LOAD_TIER, LOAD_WINDOW, LOAD_ATTEMPT = range(LOAD_GENERATION + 1, LOAD_GENERATION + 4)
ATTEMPT_WORDS = 32
MAX_ATTEMPT_BYTES = 8 * ATTEMPT_WORDS - 1
# How the worker stands with restarts inside its process; written by :mod:`outlast.runtime.in_process_mark`. These words
# belong to the process, and outlive each attachment of it.
IN_PROCESS = LOAD_ATTEMPT + ATTEMPT_WORDS
IN_PROCESS_ITERATION, IN_PROCESS_CALL, IN_PROCESS_SINCE, IN_PROCESS_PATIENCE = range(IN_PROCESS + 1, IN_PROCESS + 5)
# What the worker's own config sets, as text: its length is written last.
SETTINGS_LENGTH = IN_PROCESS_PATIENCE + 1
# What its session protects against, as text; the same way.
PROTECTION_LENGTH = SETTINGS_LENGTH + 1
PROTECTION = PROTECTION_LENGTH + 1
PROTECTION_WORDS = 64
MAX_PROTECTION_BYTES = 8 * PROTECTION_WORDS
SETTINGS = PROTECTION + PROTECTION_WORDS
PAGE_WORDS = PAGE_BYTES // 8
MAX_SETTINGS_BYTES = 8 * (PAGE_WORDS - SETTINGS)
HOT = struct.Struct(f"={HOT_WORDS}q")
PAGE = struct.Struct(f"={PAGE_WORDS}q")
NAME = struct.Struct(f"={NAME_WORDS}q")
ATTEMPT = struct.Struct(f"={ATTEMPT_WORDS}q")
_get_ident = threading.get_ident


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCopy:
    """What the ranks loaded at a cycle's start."""

    generation: int
    attempt: str
    """The attempt that had saved it."""
    tier: Tier
    """The tier by which the load of all ranks is judged."""
    suspect_window: int
    """Iterations after it in which an invalid result casts doubt on it."""


class RankPage:
    """The writing side of one rank's page.

    Thread: sections belong to the thread that called :meth:`attach`; those that another thread opens or
    closes are not recorded (said once). :meth:`heartbeat` and the single-word setters may be called from any
    thread.
    """

    __slots__ = (
        "_beat", "_counts", "_entries", "_gap", "_left", "_longest", "_names", "_num_beats",
        "_outside", "_owner", "_said", "_seq", "_stack", "_warmup", "_words", "local_rank",
    )  # fmt: skip

    def __init__(self, words: memoryview, local_rank: int) -> None:
        self.local_rank = local_rank
        self._words = words
        self._said: set[str] = set()
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
        self._beat = self._gap = self._num_beats = self._left = self._outside = 0

    def attach(
        self, *, pid: int, global_rank: int, cycle: int, warmup: Mapping[str, int] | None = None, settings: str = ""
    ) -> None:
        """Claim the page for this process and thread, and clear what it held.

        Args:
            pid: This process.
            global_rank: Its rank in the world.
            cycle: Number of the cycle.
            warmup: Section name to the number of first durations that do not count as its longest.
            settings: What this worker's own config sets, for the agent; too long: said, and not handed over.
        """
        words = self._words
        # A checkpoint manager may have reported before the worker attached.
        kept = () if words[ATTACHED] else (ITERATION, DURABLE, REPORTS, RESTORED, *range(LOAD_GENERATION, IN_PROCESS))
        for at in set(range(IN_PROCESS)).difference(kept):
            words[at] = 0
        self._reset()
        words[SETTINGS_LENGTH] = words[PROTECTION_LENGTH] = 0
        words[PID], words[RANK], words[CYCLE] = pid, global_rank, cycle
        words[COLLECTIVES] = -1
        if DURABLE not in kept:
            words[DURABLE] = -1
        for name, count in (warmup or {}).items():
            self._warmup[self.intern(name)] = count
        self._set_settings(settings.encode())
        words[ATTACHED] = now_ns()

    def _set_settings(self, text: bytes) -> None:
        if len(text) > MAX_SETTINGS_BYTES:
            self._say(
                "settings",
                f"the fault tolerance settings have {len(text)} bytes, more than the {MAX_SETTINGS_BYTES} that are "
                "handed to the agent, which does not use them; give them to outlast run, by --config",
            )
            return
        self._write_text(SETTINGS, SETTINGS_LENGTH, text)

    def set_protection(self, text: str) -> None:
        """Tell the agent what the session protects against; a text that is too long is cut."""
        self._write_text(PROTECTION, PROTECTION_LENGTH, text.encode()[:MAX_PROTECTION_BYTES])

    def _write_text(self, start: int, length: int, text: bytes) -> None:
        for at in range(0, len(text), 8):
            self._words[start + at // 8] = int.from_bytes(text[at : at + 8].ljust(8, b"\0"), "little", signed=True)
        self._words[length] = len(text)

    # -- hot path ------------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Say that this rank is alive. Thread: any."""
        now = now_ns()
        words, last = self._words, self._beat
        self._beat = words[BEAT] = now
        if last:
            gap = now - last
            if gap > self._gap:
                self._gap = words[LONGEST_GAP] = gap
        else:
            words[FIRST_BEAT] = now
        self._num_beats = words[NUM_BEATS] = self._num_beats + 1

    def open(self, index: int) -> None:
        """Enter the section whose name was interned as ``index``."""
        if _get_ident() != self._owner:
            self._say_foreign(index)
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
            self._say_deep(index)
        words[DEPTH] = depth + 1
        words[ENTRIES] += 1
        words[DONE] = self._seq = seq
        if not depth and (left := self._left) and now - left > self._outside:
            self._outside = words[LONGEST_OUTSIDE] = now - left

    def shut(self, index: int) -> None:
        """Leave the innermost open section of this name; nothing happens when there is none."""
        if _get_ident() != self._owner:
            return
        stack = self._stack
        if not stack:
            return
        if stack[-1][0] != index:
            self._shut_below(index)
            return
        now = now_ns()
        words = self._words
        _, start, ordinal = stack.pop()
        depth = len(stack)
        words[BEGUN] = seq = self._seq + 1
        words[DEPTH] = depth
        if not depth:
            self._left = words[LEFT] = now
        words[DONE] = self._seq = seq
        self._measured(index, now - start, ordinal)

    def _measured(self, index: int, took_ns: int, ordinal: int) -> None:
        slot = NAMES + NAME_WORDS + SLOT_WORDS * index
        self._counts[index] = self._words[slot + 1] = self._counts[index] + 1
        if took_ns > self._longest[index] and ordinal >= self._warmup[index]:
            self._longest[index] = self._words[slot] = took_ns

    # -- names ---------------------------------------------------------------------------------------------

    def intern(self, name: str) -> int:
        """Return the number of a section name, for :meth:`open` and :meth:`shut`.

        Raises:
            ConfigError: The name is empty or longer than 39 bytes.
        """
        if (index := self._names.get(name)) is not None:
            return index
        text = name.encode()
        if not 0 < len(text) <= MAX_NAME_BYTES or b"\0" in text:
            raise ConfigError(f"section name {name!r} must have 1 to {MAX_NAME_BYTES} bytes; shorten it")
        index = self._words[NUM_NAMES]
        if index >= MAX_NAMES:
            self._say(
                "names",
                f"more than {MAX_NAMES} section names; {name!r} and later ones are watched as {OTHER!r}",
            )
            index, text = MAX_NAMES, OTHER.encode()
        slot = NAMES + SLOT_WORDS * index
        for at, word in enumerate(NAME.unpack(text.ljust(NAME.size, b"\0"))):
            self._words[slot + at] = word
        if index < MAX_NAMES:
            self._words[NUM_NAMES] = index + 1
        self._names[name] = index
        return index

    def enter(self, name: str) -> None:
        """Enter a section by name."""
        self.open(self.intern(name))

    def leave(self, name: str | None = None) -> bool:
        """Leave the innermost section, or the innermost one of this name; return whether one was open."""
        if _get_ident() != self._owner:
            return False
        index = self._stack[-1][0] if name is None and self._stack else self._names.get(name or "", -1)
        if all(entry[0] != index for entry in self._stack):
            return False
        self.shut(index)
        return True

    def _shut_below(self, index: int) -> None:
        """Take a section that is not the innermost one out of the stack."""
        stack = self._stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at][0] == index:
                break
        else:
            return
        now = now_ns()
        _, start, ordinal = stack.pop(at)
        words = self._words
        words[BEGUN] = seq = self._seq + 1
        for depth, (name, begun, nth) in enumerate(stack[:MAX_DEPTH]):
            words[STACK + 2 * depth] = name | nth << 8
            words[STACK + 1 + 2 * depth] = begun
        words[DEPTH] = len(stack)
        words[DONE] = self._seq = seq
        self._measured(index, now - start, ordinal)

    def _say_foreign(self, index: int) -> None:
        self._say(
            "foreign",
            f"section {self._name(index)!r} is opened by thread {threading.current_thread().name!r}, "
            "not by the one that attached to the board: sections of other threads are not watched",
        )

    def _say_deep(self, index: int) -> None:
        self._say(
            "deep",
            f"section {self._name(index)!r} lies deeper than {MAX_DEPTH} sections: measured, not watched",
        )

    def _name(self, index: int) -> str:
        return next((name for name, number in self._names.items() if number == index), OTHER)

    def _say(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            log.warning("%s", text)

    # -- facts ---------------------------------------------------------------------------------------------

    def set_iteration(self, iteration: int) -> None:
        """Record the number of optimizer steps done."""
        if iteration != self._words[ITERATION]:
            self._words[ENTRIES_AT_ITERATION] = self._words[ENTRIES]
            self._words[ITERATION] = iteration

    def set_durable_iteration(self, iteration: int) -> None:
        """Record the highest iteration that is saved for good."""
        self._words[DURABLE] = iteration
        self._words[REPORTS] = 1

    def report_progress(self) -> None:
        """Say that this worker will report what is durable, though nothing is yet."""
        self._words[REPORTS] = 1

    def set_restored(self, loaded: LoadedCopy | None = None) -> None:
        """Say that this worker loaded a checkpoint in this cycle, and which, where that is known."""
        words = self._words
        if loaded is not None:
            attempt = loaded.attempt.encode()
            if len(attempt) > MAX_ATTEMPT_BYTES:
                self._say("attempt", f"attempt {loaded.attempt!r} has a name too long to be judged by its results")
            else:
                for at, word in enumerate(ATTEMPT.unpack(attempt.ljust(ATTEMPT.size, b"\0"))):
                    words[LOAD_ATTEMPT + at] = word
                words[LOAD_GENERATION], words[LOAD_WINDOW] = loaded.generation, loaded.suspect_window
                words[LOAD_TIER] = loaded.tier + 1
        words[RESTORED] = 1

    def promise_heartbeats(self, promised: bool) -> None:
        """Say whether this worker sends heartbeats as long as it is healthy."""
        self._words[PROMISES] = int(promised)

    def set_leaving(self, exit_code: int) -> None:
        """Say with which exit code, other than 0, this process is about to end."""
        self._words[LEAVING] = exit_code

    def set_collectives(self, count: int) -> None:
        """Record how many collectives this rank has entered; -1 = not known."""
        self._words[COLLECTIVES] = count

    def finish(self) -> None:
        """Say that this rank is done; nothing is enforced on it any more."""
        if not self._words[FINISHED]:
            if self._left and not self._stack:
                self._words[LONGEST_OUTSIDE] = self._outside = max(self._outside, now_ns() - self._left)
            self._words[FINISHED] = 1

    @property
    def depth(self) -> int:
        """Number of open sections."""
        return len(self._stack)
