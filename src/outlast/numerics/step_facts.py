"""What a diagnostic save keeps of a step, so that a later cycle can run it again: batches, results, random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from outlast.decoding import convert
from outlast.numerics import plain
from outlast.numerics.batches import ReplayableIterator
from outlast.numerics.validations import Rejected
from outlast.policy.rerun import Diagnosis, Replay, decode_diagnosis, encode_diagnosis, to_number

__all__ = ["StepFacts", "expected_of"]


class StepFacts:
    """This rank's facts of one step.

    Args:
        stored: Plain values and tensors, as a checkpoint holds them.
    """

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self.stored = dict(stored)

    @classmethod
    def gather(
        cls,
        *,
        diagnosis: Diagnosis,
        node: str,
        device: str,
        rejected: Mapping[int, tuple[Rejected, Any]],
        struck: Sequence[int],
        iterators: Sequence[ReplayableIterator[Any]],
        random: Mapping[str, Any],
    ) -> StepFacts:
        """Take the facts of a step; batches are referred to, not copied."""
        batches: list[list[Any]] = []
        problems: list[str] = []
        for iterator in iterators:
            forms = [plain.store(batch) for batch in iterator.drawn]
            problems += [text for _, texts in forms for text in texts]
            batches.append([form for form, _ in forms])
        return cls(
            {
                "iteration": diagnosis.iteration,
                "diagnosis": encode_diagnosis(diagnosis),
                "node": node,
                "device": device,
                "rejected": [[msgspec.to_builtins(one), plain.store(result)[0]] for one, result in rejected.values()],
                "struck": list(struck),
                "batches": None if problems else batches,
                "random_after": [list(iterator.random_after) for iterator in iterators],
                "problems": problems,
                "random": dict(random),
            }
        )

    @property
    def iteration(self) -> int:
        """Number of optimizer steps done before the step."""
        return int(self.stored["iteration"])

    @property
    def node(self) -> str:
        """Node of this rank then."""
        return str(self.stored["node"])

    @property
    def device(self) -> str:
        """What this rank computed on then."""
        return str(self.stored["device"])

    @property
    def struck(self) -> list[int]:
        """Validations that were struck on purpose."""
        return list(self.stored["struck"])

    @property
    def random(self) -> dict[str, Any]:
        """This rank's random numbers at the beginning of the step."""
        return dict(self.stored["random"])

    @property
    def problems(self) -> list[str]:
        """What of the batches could not be stored; nothing was stored of them then."""
        return list(self.stored["problems"])

    def as_replay(self, *, tries: int) -> Replay:
        """Return what is to be replayed, as far as the save knows.

        Args:
            tries: Replays on the same device that were done.
        """
        known = decode_diagnosis(self.stored["diagnosis"])
        return Replay(
            iteration=known.iteration,
            device=known.device,
            node=known.node,
            rank=known.rank,
            call=known.call,
            what=known.what,
            first=known.first,
            batch=known.batch,
            tries=tries,
        )

    def replay(self, iterators: Sequence[ReplayableIterator[Any]], local_rank: int) -> bool:
        """Let a step's iterators give the batches of this one; return whether they will.

        They do not if the batches could not be stored, or there are more or fewer iterators now.

        Args:
            iterators: Those of the step that begins.
            local_rank: This rank's on its node.
        """
        batches, random_after = self.stored["batches"], self.stored["random_after"]
        if batches is None or len(batches) != len(iterators):
            return False
        for iterator, forms, states in zip(iterators, batches, random_after, strict=True):
            iterator.replay([plain.give_back(form, local_rank) for form in forms], states)
        return True

    def expected(self, local_rank: int) -> dict[int, tuple[Rejected, Any]]:
        """Return what was rejected, with its result."""
        expected = {}
        for plain_one, form in self.stored["rejected"]:
            one = convert(plain_one, Rejected)
            result = to_number(one.value) if form is None else plain.give_back(form, local_rank)
            expected[one.call] = (one, result)
        return expected


def expected_of(replay: Replay) -> dict[int, tuple[Rejected, Any]]:
    """Return what was rejected as far as the launcher knows it."""
    one = Rejected(call=replay.call, what=replay.what, message="", value=replay.first)
    return {replay.call: (one, to_number(replay.first))}
