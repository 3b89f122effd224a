"""Consensus: decisions that all ranks take together, for one small reduction a step.

A rank that is told to leave must not leave alone: its peers would wait for it in the next collective for
ever. So each rank says at a step's begin what it wants, the largest of a few integers is found beside the step, and at
the step's end every rank reads the same answer. Nobody waits extra: by then a step's own collectives have brought the
ranks together anyway. What becomes known during a step is told at the next one's begin.

The reduction has connections of its own (:mod:`outlast.runtime.dissemination`), so that it neither orders itself behind
gradients nor needs a device, and can be left at any moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast import clock
from outlast.runtime.dissemination import Dissemination

__all__ = ["Consensus"]


class Consensus:
    """Agree on the largest of what any rank asked for, once a step.

    Args:
        questions: Names of what is asked, the same in the same order on all ranks.
        world_size: Number of ranks; 1 needs no ``torch.distributed``.
        timeout_s: Seconds after which a reduction fails because a peer did not take part.

    Raises:
        RendezvousError: The ranks did not find each other.

    Collective: with more than one rank, all ranks of the default group must make it (they connect).
    Blocks: up to ``timeout_s``, until all ranks have come.
    Thread: one at a time.
    """

    def __init__(self, questions: Sequence[str], *, world_size: int = 1, timeout_s: float = 1800.0) -> None:
        assert questions, "ask at least one question"
        assert len(set(questions)) == len(questions), "a question is asked twice"
        self.questions = tuple(questions)
        self.waited_s = 0.0
        """How long this rank has waited for others in :meth:`finish` and :meth:`agree`, in all."""
        self._ranks = (
            Dissemination.open(timeout_s=timeout_s) if world_size > 1 else Dissemination((), (), timeout_s=timeout_s)
        )

    def begin(self, asked: Mapping[str, int]) -> None:
        """Start the step's reduction with what this rank knows now.

        Args:
            asked: Question to a number, 0 or absent for "no"; the largest of all ranks is agreed on.

        Collective: once a step on every rank, followed by :meth:`finish`.
        Blocks: never.
        """
        self._ranks.start([int(asked.get(question, 0)) for question in self.questions])

    def finish(self) -> dict[str, int]:
        """Return what all ranks agreed on: each question's largest number.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: once a step on every rank, after :meth:`begin`.
        Blocks: until all ranks have begun the same step; up to the timeout.
        """
        return dict(zip(self.questions, self._wait(), strict=True))

    def agree(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' numbers, one by one, at once.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks, with as many numbers; not between :meth:`begin` and :meth:`finish`.
        Blocks: until all ranks have come; up to the timeout.
        """
        self._ranks.start(values)
        return self._wait()

    @property
    def pending(self) -> bool:
        """Whether a reduction was begun and not read."""
        return self._ranks.pending

    def close(self) -> None:
        """Leave, however the peers fare: those that wait for this rank fail. Idempotent. Blocks: never."""
        self._ranks.cut()
        self._ranks.close()

    def _wait(self) -> list[int]:
        begin_ns = clock.now_ns()
        try:
            return self._ranks.finish()
        finally:
            self.waited_s += (clock.now_ns() - begin_ns) / 1e9
