"""The run that owns a checkpoint directory is identified, with lost or wrong hints and concurrent runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import assume, given
from hypothesis import strategies as st

from outlast.policy.lease import ClaimStep, DirectoryRun, RunEvidence, choose_run, find_owner, judge_claim

DAMAGE = st.sampled_from([None, "run-x", "run-A", "run-B"])


@dataclass
class Place:
    """A directory: the hint, and the run of each checkpoint, oldest first."""

    hint: str | None = None
    runs: list[str] = field(default_factory=list)

    def read_hint(self) -> tuple[str | None, int]:
        return self.hint, len(self.runs)

    def owner(self, own: str | None = None) -> DirectoryRun | None:
        return find_owner(self.hint, reversed(self.runs), own=own)


@dataclass
class Training:
    """A run that saves; each ``next()`` of :meth:`steps` is one atomic action."""

    place: Place
    run: str
    is_rejected: bool = False
    has_read: bool = False

    def steps(self) -> Iterator[None]:
        seen, owner, is_held = self.place.read_hint(), self.place.owner(), False
        self.run = owner.run if owner is not None and owner.is_verified else self.run
        self.has_read = True
        yield
        while True:
            for _ in ("before the data", "before the commit"):
                while not (is_held and self.place.hint == self.run):
                    now, owner = self.place.read_hint(), self.place.owner(self.run)
                    step = judge_claim(self.run, owner, now[0], is_unchanged=not is_held and now == seen)
                    yield  # another run may act between the check and the action
                    if step is ClaimStep.REFUSE:
                        self.is_rejected = True
                        return
                    if step is not ClaimStep.CREATE or self.place.hint is None:
                        self.place.hint = self.run
                        is_held = True
                        break
                yield
            self.place.runs.append(self.run)
            yield


@given(st.sampled_from([None, "run-dead"]), st.lists(st.booleans(), max_size=40))
def test_one_of_two_concurrent_new_runs_is_rejected(left: str | None, order: list[bool]) -> None:
    """For any interleaving of checks, claims and commits, and with the hint of a dead run, one run is soon rejected and
    every checkpoint that the other one saves from then on can be loaded."""
    place = Place(hint=left)
    first, second = Training(place, "run-A"), Training(place, "run-B")
    programs = {first.run: first.steps(), second.run: second.steps()}
    for turn in order:
        training = first if turn else second
        assume(training.has_read or not place.runs)  # an existing checkpoint would be resumed
        next(programs["run-A" if turn else "run-B"], None)
    for name in ("run-A", "run-B") * 3:
        for _ in range(12):
            training = first if name == "run-A" else second
            assume(training.has_read or not place.runs)
            next(programs[name], None)
    assert [first.is_rejected, second.is_rejected].count(True) == 1
    survivor = second if first.is_rejected else first
    assert place.owner() == DirectoryRun(survivor.run, is_verified=True)
    assert place.hint == survivor.run
    assert place.runs[-1] == survivor.run


@given(st.lists(st.tuples(st.integers(1, 8), DAMAGE), max_size=8))
def test_damaged_hint_never_rejects_the_owner(damages: list[tuple[int, str | None]]) -> None:
    """After a run's first commit its hint may be deleted, torn or changed at any time: the run is never rejected, it
    rewrites the hint, and the next process resumes the same run."""
    place = Place()
    training = Training(place, "run-A")
    program = training.steps()
    while not place.runs:
        next(program)
    for count, hint in damages:
        for _ in range(count):
            next(program)
        place.hint = hint
        assert place.owner() == DirectoryRun("run-A", is_verified=True)
    for _ in range(8):
        next(program)
    assert not training.is_rejected
    assert place.hint == "run-A"


@given(st.sampled_from([None, "a", "b", "c"]), st.lists(st.sampled_from("ab")))
def test_manifests_take_precedence_over_the_hint(hint: str | None, runs: list[str]) -> None:
    """The hint counts if a manifest belongs to the same run or none exists; otherwise the newest checkpoint decides."""
    owner = find_owner(hint, iter(runs))
    if not runs:
        assert owner == (DirectoryRun(hint, is_verified=False) if hint is not None else None)
    else:
        assert owner == DirectoryRun(hint if hint in runs else runs[0], is_verified=True)


def test_agreeing_hint_needs_one_manifest() -> None:
    """If the newest checkpoint agrees with the hint, no other manifest is read."""

    def read() -> Iterator[str]:
        yield "a"
        raise AssertionError("an older manifest was read")

    assert find_owner("a", read()) == DirectoryRun("a", is_verified=True)


def test_leftovers_of_another_run_do_not_reject_a_spare() -> None:
    """A spare with checkpoints of another run is accepted, unless that run continues to save there."""
    left = DirectoryRun("old", is_verified=True)
    assert judge_claim("new", left, "old", is_unchanged=True) is ClaimStep.WRITE
    assert judge_claim("new", left, "old", is_unchanged=False) is ClaimStep.REFUSE


def test_most_common_run_is_resumed() -> None:
    """The global tier decides; without it the run that most nodes hold is resumed, not an older run's leftovers."""
    near = [
        RunEvidence("old", "old", 9000),
        RunEvidence(None, "ours", 100),
        RunEvidence(None, "ours", 90),
        RunEvidence(),
    ]
    assert choose_run(RunEvidence("far", "far", 1), near) == "far"
    assert choose_run(RunEvidence(None, None), near) == "ours"
    assert choose_run(None, near) == "ours"
    assert choose_run(None, [RunEvidence("a", "a", 1), RunEvidence("b", "b", 2)]) == "b"
    assert choose_run(RunEvidence("new", None), [RunEvidence("new", None)]) is None


def test_foreign_manifest_does_not_outvote_the_hint() -> None:
    """If the only readable manifest in the global tier is foreign, its hint counts if the nodes' checkpoints verify it;
    an unverified hint does not count."""
    near = [RunEvidence("ours", "ours", 3)]
    assert choose_run(RunEvidence("ours", "another", 9), near) == "ours"
    assert choose_run(RunEvidence("nobody", "another", 9), near) == "another"
