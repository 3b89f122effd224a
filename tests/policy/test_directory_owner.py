"""Whose a directory of checkpoints is, whatever becomes of the hint, and whoever else begins there."""

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

    def look(self) -> tuple[str | None, int]:
        return self.hint, len(self.runs)

    def owner(self, own: str | None = None) -> DirectoryRun | None:
        return find_owner(self.hint, reversed(self.runs), own=own)


@dataclass
class Training:
    """A run that saves; each ``next()`` of :meth:`steps` is one thing that no other run gets into."""

    place: Place
    run: str
    is_refused: bool = False
    has_looked: bool = False

    def steps(self) -> Iterator[None]:
        seen, owner, is_held = self.place.look(), self.place.owner(), False
        self.run = owner.run if owner is not None and owner.is_verified else self.run
        self.has_looked = True
        yield
        while True:
            for _ in ("before the data", "before the commit"):
                while not (is_held and self.place.hint == self.run):
                    now, owner = self.place.look(), self.place.owner(self.run)
                    step = judge_claim(self.run, owner, now[0], is_unchanged=not is_held and now == seen)
                    yield  # others may be quicker between the look and the deed
                    if step is ClaimStep.REFUSE:
                        self.is_refused = True
                        return
                    if step is not ClaimStep.CREATE or self.place.hint is None:
                        self.place.hint = self.run
                        is_held = True
                        break
                yield
            self.place.runs.append(self.run)
            yield


@given(st.sampled_from([None, "run-dead"]), st.lists(st.booleans(), max_size=40))
def test_of_two_runs_that_begin_together_one_saves_and_the_other_is_refused(
    left: str | None, order: list[bool]
) -> None:
    """However their looks, claims and commits get between each other, and whether or not a run that died before its
    first commit left its hint: soon one is refused, and all that the other one saves from then on can be loaded."""
    place = Place(hint=left)
    first, second = Training(place, "run-A"), Training(place, "run-B")
    programs = {first.run: first.steps(), second.run: second.steps()}
    for turn in order:
        training = first if turn else second
        assume(training.has_looked or not place.runs)  # what is there already would be gone on with
        next(programs["run-A" if turn else "run-B"], None)
    for name in ("run-A", "run-B") * 3:
        for _ in range(12):
            training = first if name == "run-A" else second
            assume(training.has_looked or not place.runs)
            next(programs[name], None)
    assert [first.is_refused, second.is_refused].count(True) == 1
    survivor = second if first.is_refused else first
    assert place.owner() == DirectoryRun(survivor.run, is_verified=True)
    assert place.hint == survivor.run
    assert place.runs[-1] == survivor.run


@given(st.lists(st.tuples(st.integers(1, 8), DAMAGE), max_size=8))
def test_a_hint_that_is_lost_or_wrong_costs_a_run_nothing(damages: list[tuple[int, str | None]]) -> None:
    """Once a run has committed, its hint may be deleted, torn or changed at any moment: the run is never refused,
    writes it again, and whoever comes next goes on with the same run."""
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
    assert not training.is_refused
    assert place.hint == "run-A"


@given(st.sampled_from([None, "a", "b", "c"]), st.lists(st.sampled_from("ab")))
def test_manifests_decide_and_the_hint_only_among_them(hint: str | None, runs: list[str]) -> None:
    """The hint counts if a manifest names the same run, or there is none; otherwise the newest checkpoint does."""
    owner = find_owner(hint, iter(runs))
    if not runs:
        assert owner == (DirectoryRun(hint, is_verified=False) if hint is not None else None)
    else:
        assert owner == DirectoryRun(hint if hint in runs else runs[0], is_verified=True)


def test_no_more_manifests_are_read_than_are_needed() -> None:
    """Where the newest checkpoint agrees with the hint, no other is looked at."""

    def read() -> Iterator[str]:
        yield "a"
        raise AssertionError("an older manifest was read")

    assert find_owner("a", read()) == DirectoryRun("a", is_verified=True)


def test_what_an_older_run_left_on_a_nodes_disk_is_taken_over() -> None:
    """A spare that brings another run's checkpoints costs nothing, unless that run goes on saving there."""
    left = DirectoryRun("old", is_verified=True)
    assert judge_claim("new", left, "old", is_unchanged=True) is ClaimStep.WRITE
    assert judge_claim("new", left, "old", is_unchanged=False) is ClaimStep.REFUSE


def test_the_run_that_most_places_hold_is_gone_on_with() -> None:
    """The global tier decides; without it a node with an older run's leftovers does not outvote the others."""
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


def test_one_foreign_manifest_does_not_decide_against_all_others() -> None:
    """Where all that can be read in the global tier is a manifest of another run, its hint counts, if what the nodes
    hold proves it; a hint that nothing proves does not."""
    near = [RunEvidence("ours", "ours", 3)]
    assert choose_run(RunEvidence("ours", "another", 9), near) == "ours"
    assert choose_run(RunEvidence("nobody", "another", 9), near) == "another"
