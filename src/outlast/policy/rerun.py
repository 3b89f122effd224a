"""What a re-run tells about an invalid result, in the form in which workers and launcher pass it on.

A :class:`Diagnosis` is what a worker knows when it leaves with exit code 16 or 17, or with 18 for a slow rank; a
:class:`Replay` is what the launcher asks of the cycle that follows. JSON has no NaN and no infinity, which are what
this is about: numbers are kept in the form that :func:`to_json_number` gives them.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TypeAlias

import msgspec

from outlast.decoding import from_json

__all__ = [
    "Diagnosis",
    "Finding",
    "JsonNumber",
    "Replay",
    "decode_diagnosis",
    "decode_replay",
    "encode_diagnosis",
    "encode_replay",
    "relative_difference",
    "to_json_number",
    "to_number",
]

JsonNumber: TypeAlias = float | str | None
"""A number as JSON can hold it: ``"nan"``, ``"inf"`` and ``"-inf"`` for those; ``None`` = there is none."""


class Finding(StrEnum):
    """What is known of an invalid result."""

    TRANSIENT = "transient"
    """Run again on the same device it was another one, and valid."""
    REPRODUCED = "reproduced"
    """Run again on the same device it was the same; another device must decide."""
    PERSISTENT = "persistent"
    """Another device gave a valid one: the first device is at fault."""
    CORRECT = "correct"
    """Another device gave an invalid one too: the data or the model is at fault."""
    UNREACHED = "unreached"
    """The run that was to confirm it did not come to the same validation."""
    UNDECIDED = "undecided"
    """None of these; in particular, run again it was invalid in another way."""
    REPEATED = "repeated"
    """It came in too many steps in a row: the run stops, for people to decide."""
    SPLIT = "split"
    """Replicas differ, and no majority says whose is bad: no rank, node or device is blamed."""
    SLOW = "slow"
    """No result is invalid: the rank is slow, and its node is to be replaced (exit code 18)."""


_MEANING = {
    Finding.TRANSIENT: "a transient fault",
    Finding.REPRODUCED: "reproduced on the same device; another device must decide",
    Finding.PERSISTENT: "a persistent fault of that device, since another one gives a valid result",
    Finding.CORRECT: "correct, since another device gives an invalid result too: the data or the model is at fault",
    Finding.UNREACHED: "the run that was to confirm it did not reach this validation",
    Finding.UNDECIDED: "undecided",
    Finding.REPEATED: "the run stops, so that people can look at the data and at the ranks named, and go back",
    Finding.SLOW: "all ranks leave, so that its node can be replaced",
    Finding.SPLIT: "culprit unknown, as no majority says which replica is bad",
}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one invalid result, or of one slow rank."""

    finding: Finding
    rank: int
    """Global rank that saw it; of a slow rank: that rank."""
    node: str = ""
    """Node of that rank."""
    device: str = ""
    """What that rank computed on when it saw it first, as :func:`outlast.runtime.device.device_name` names it."""
    iteration: int
    """Number of optimizer steps done before the step."""
    call: int = 0
    """Which validation of the step it was, from 0."""
    what: str = ""
    """Name of the value, such as ``loss``."""
    message: str = ""
    """Why it was rejected."""
    first: JsonNumber = None
    """The value when it was rejected first."""
    second: JsonNumber = None
    """The value of the run that was to confirm it; ``None`` = there is none."""
    batch: str = ""
    """Fingerprint of the rank's batches of that step; empty = it had none."""
    tries: int = 0
    """Replays on the same device that were done."""
    max_tries: int = 2
    """Replays on the same device that may be done (``max_same_device_reruns``)."""
    replayed_on: str = ""
    """What the replay that this is about ran on; empty = it was no replay."""
    rejected_ranks: tuple[int, ...] = ()
    """Ranks with an invalid result, in order."""

    def describe(self) -> str:
        """Return one line for people."""
        if self.first is None and self.message:  # no value was rejected: replicas, or ranks, were compared
            is_blamed = self.finding == Finding.PERSISTENT
            meaning = "a fault of that device, as the others agree" if is_blamed else _MEANING[self.finding]
            return f"{self.message}: {meaning}"
        where = f"rank {self.rank}"
        if self.node:
            where += f" on node {self.node}"
        if self.device:
            where += f" (device {self.device})"
        line = f"{self.what or 'a result'} of {where} at iteration {self.iteration}, validation {self.call}"
        line += f", was {_text(self.first)}"
        if self.message:
            line += f" ({self.message})"
        if self.second is not None:
            line += f", then {_text(self.second)}"
        if self.replayed_on:
            line += f" when it was replayed on {self.replayed_on}"
        line += f": {_MEANING[self.finding]}"
        if self.batch:
            line += f"; batch {self.batch}"
        others = [str(rank) for rank in self.rejected_ranks if rank != self.rank]
        if others:
            line += f"; invalid on rank{'s' if len(others) > 1 else ''} {', '.join(others)} too"
        return line


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a cycle is to run again before anything else: the step of a diagnostic save, with its saved batches."""

    iteration: int
    """That of the diagnostic save."""
    attempt: str = ""
    """The attempt that made it; empty = the newest of that iteration."""
    device: str
    """What ``rank`` had computed on; the replay is on another device if it does not compute on that now."""
    node: str = ""
    """Its node then."""
    rank: int
    """Global rank that saw the invalid result."""
    call: int = 0
    """Which validation of the step it was, from 0."""
    what: str = ""
    """Name of the value."""
    first: JsonNumber = None
    """The value when it was rejected first."""
    batch: str = ""
    """Fingerprint of the rank's batches of that step: where the save cannot be had, the same ones may come again."""
    tries: int = 0
    """Replays on the same device that were done before this one."""


def relative_difference(a: float, b: float) -> float:
    """Return how much two results differ: 0 when they are the same, infinite when one of them is no number.

    The formula is the default comparison of Megatron-LM's re-run state machine: 0 when equal or both NaN, infinite when
    one is NaN or infinite, else the symmetric relative difference ``|2 (a - b) / (a + b)|``. Here it is written so that
    the sum of large numbers does not overflow; it is infinite where ``a + b`` is 0.
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    mean = a / 2 + b / 2
    return abs((a - b) / mean) if mean != 0 else math.inf


def to_json_number(value: float | None) -> JsonNumber:
    """Return a number in a form that JSON can hold."""
    return value if value is None or math.isfinite(value) else str(float(value))


def to_number(value: JsonNumber) -> float | None:
    """Return the number that :func:`to_json_number` was given.

    Raises:
        ValueError: It is a text that is no number.
    """
    return value if value is None else float(value)


def encode_diagnosis(diagnosis: Diagnosis) -> bytes:
    """Return a diagnosis as JSON."""
    return msgspec.json.encode(diagnosis)


def decode_diagnosis(data: bytes | str) -> Diagnosis:
    """Return the diagnosis that :func:`encode_diagnosis` made JSON of.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return from_json(data, Diagnosis)


def encode_replay(replay: Replay) -> str:
    """Return a replay as the text that workers are given."""
    return msgspec.json.encode(replay).decode()


def decode_replay(text: str | None) -> Replay | None:
    """Return the replay that :func:`encode_replay` made text of; ``None`` = nothing is to be replayed.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return from_json(text, Replay) if text else None


def _text(value: JsonNumber) -> str:
    return "unknown" if value is None else value if isinstance(value, str) else f"{value:.9g}"
