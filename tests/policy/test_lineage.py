"""Checkpoints of the branch that training continued from, over random histories of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.lineage import MAX_FORKS, UNKNOWN_ERA, Branch, Lineage, SavedPoint


@dataclass(eq=False)
class _Saved:
    """A checkpoint of a simulated run."""

    point: SavedPoint
    branch: Branch
    world_size: int
    ancestors: tuple[_Saved, ...]
    """The checkpoints that its training passed through, oldest first."""


@dataclass
class _Run:
    """A run whose sets of processes start one after the other, with any number of ranks and any available nodes."""

    draw: st.DataObject
    saved: list[_Saved] = field(default_factory=list)
    """In the order of their commits."""
    cycles: int = 0

    def lineage(self, seen: list[_Saved]) -> Lineage:
        return Lineage.of([one.point for one in seen], [one.branch for one in seen])

    def start(self, seen: list[_Saved], *, from_memory: bool = False) -> _Saved | None:
        """Resume from the newest of these checkpoints, save a few, and return the resumed checkpoint."""
        world_size = self.draw.draw(st.integers(1, 4), label="ranks")
        lineage, name = self.lineage(seen), f"job-{self.cycles}-ab"
        self.cycles += 1
        usable = [
            one
            for one in seen
            if (one.point.is_global or one.world_size == world_size)
            and lineage.why_superseded(one.point.attempt) is None
            and self.draw.draw(st.integers(0, 4), label="0: damaged") != 0
        ]
        loaded = max(usable, key=lambda one: one.point.iteration, default=None)
        branch = lineage.begin(name, *((None, 0) if loaded is None else (loaded.point.attempt, loaded.point.iteration)))
        trained = () if loaded is None else (*loaded.ancestors, loaded)
        self._save(branch, world_size, trained)
        return loaded

    def restart_in_process(self) -> None:
        """Continue from memory: nothing is loaded, and every checkpoint is visible."""
        newest = self.saved[-1]
        own = [one for one in newest.ancestors if one.branch != newest.branch]
        origin = (own[-1].point.attempt, own[-1].point.iteration) if own else None
        name = f"job-{self.cycles}-ab"
        self.cycles += 1
        branch = self.lineage(self.saved).resume(name, origin, newest.point.iteration)
        self._save(branch, newest.world_size, (*newest.ancestors, newest))

    def _save(self, branch: Branch, world_size: int, trained: tuple[_Saved, ...]) -> None:
        iteration = trained[-1].point.iteration if trained else 0
        for number, step in enumerate(self.draw.draw(st.lists(st.integers(1, 9), max_size=3), label="saves")):
            iteration += step
            is_global = self.draw.draw(st.booleans(), label="global")
            point = SavedPoint(iteration, f"{branch.name}.{number}", branch.era, is_global)
            one = _Saved(point, branch, world_size, trained)
            trained = (*trained, one)
            self.saved.append(one)


@given(st.data(), st.integers(1, 12))
def test_abandoned_branch_is_never_loaded(data: st.DataObject, cycles: int) -> None:
    """For any world sizes and lost tiers, the loaded checkpoint is the last committed one or one of its ancestors."""
    run = _Run(data)
    for _ in range(cycles):
        newest = run.saved[-1] if run.saved else None
        loaded = run.start(run.saved)
        assert loaded is None or newest is None or loaded is newest or loaded in newest.ancestors
        if run.saved and data.draw(st.booleans(), label="restart in process"):
            run.restart_in_process()


@given(st.data(), st.integers(1, 12))
def test_ancestors_of_the_newest_branch_stay_loadable(data: st.DataObject, cycles: int) -> None:
    """Every checkpoint that the newest branch descends from can be loaded, however many others were deleted."""
    run = _Run(data)
    for _ in range(cycles):
        run.start(run.saved)
        if run.saved and data.draw(st.booleans(), label="restart in process"):
            run.restart_in_process()
        if not run.saved:
            continue
        newest = run.saved[-1]
        deleted = data.draw(st.sets(st.sampled_from(range(len(run.saved)))), label="deleted")
        left = [one for number, one in enumerate(run.saved) if number not in deleted or one is newest]
        lineage = run.lineage(left)
        for one in left:
            is_trained_on = one is newest or one in newest.ancestors
            assert (lineage.why_superseded(one.point.attempt) is None) == is_trained_on


@given(st.data(), st.integers(2, 10))
def test_returning_node_does_not_restore_a_branch(data: st.DataObject, cycles: int) -> None:
    """A returning node's checkpoint is not loaded if a visible one of a later branch superseded it, and the processes
    of that branch had found it or reached the global tier without it."""
    run = _Run(data)
    found: dict[str, set[str]] = {}
    for _ in range(cycles):
        away = data.draw(st.sets(st.sampled_from(range(max(1, len(run.saved))))), label="away")
        seen = [one for number, one in enumerate(run.saved) if number not in away or one.point.is_global]
        name = f"job-{run.cycles}-ab"
        loaded = run.start(seen)
        found[name] = {one.branch.name for one in seen}
        if loaded is None:
            continue
        later = [one for one in seen if int(one.branch.name.split("-")[1]) > int(loaded.branch.name.split("-")[1])]
        for one in later:
            if one.point.is_global or loaded.branch.name in found[one.branch.name]:
                assert loaded in one.ancestors


@given(st.data(), st.integers(2, 10))
def test_superseded_checkpoint_is_never_the_newest_choice(data: st.DataObject, cycles: int) -> None:
    """A checkpoint that a subset of the run's checkpoints shows to be superseded is not the newest loadable one of the
    full set, with different nodes away at each start and listing."""
    run = _Run(data)
    for _ in range(cycles):
        away = data.draw(st.sets(st.sampled_from(range(max(1, len(run.saved))))), label="away")
        run.start([one for number, one in enumerate(run.saved) if number not in away or one.point.is_global])
    hidden = data.draw(st.sets(st.sampled_from(range(max(1, len(run.saved))))), label="not listed")
    listed = run.lineage([one for number, one in enumerate(run.saved) if number not in hidden])
    all_checkpoints = run.lineage(run.saved)
    loadable = [one.point for one in run.saved if all_checkpoints.why_superseded(one.point.attempt) is None]
    newest = max(loadable, key=lambda point: point.iteration, default=None)
    certain = {attempt for attempt in listed.saved if listed.is_superseded_for_certain(attempt)}
    assert newest is None or newest.attempt not in certain
    assert all(listed.why_superseded(attempt) is not None for attempt in certain)
    if not hidden:
        left_by_fork = {
            one.point.attempt
            for one in run.saved
            for fork in (all_checkpoints.newest.forks if all_checkpoints.newest else ())
            if fork.branch == one.branch.name and one.point.iteration > fork.iteration
        }
        assert left_by_fork <= certain


def test_global_tier_orders_branches_of_one_era() -> None:
    """Two branches from iteration 20 did not find each other, and one committed 24 to the global tier: without that
    commit neither is certainly superseded."""
    origin = SavedPoint(20, "job-0-aa.0", (1, 1), False)
    first = Lineage.of([origin], [Branch("job-0-aa", (1, 1))])
    visible, present = first.begin("job-1-bb", "job-0-aa.0", 20), first.begin("job-2-cc", "job-0-aa.0", 20)
    assert visible.era == present.era
    near = [origin, SavedPoint(27, "job-1-bb.0", visible.era, False), SavedPoint(26, "job-2-cc.1", present.era, False)]
    found = Lineage.of(near, [visible, present])
    assert found.why_superseded("job-2-cc.1") is not None
    assert not found.is_superseded_for_certain("job-2-cc.1")
    all_checkpoints = Lineage.of([*near, SavedPoint(24, "job-2-cc.0", present.era, True)], [visible, present])
    assert all_checkpoints.why_superseded("job-2-cc.1") is None
    assert all_checkpoints.is_superseded_for_certain("job-1-bb.0")


def test_checkpoints_without_an_era_need_evidence() -> None:
    """If manifests have no era, only checkpoints beyond the loaded attempt are excluded."""
    near, far = SavedPoint(27, "job-0-aa.1", UNKNOWN_ERA, False), SavedPoint(20, "job-0-aa.0", UNKNOWN_ERA, True)
    later = SavedPoint(26, "job-1-bb.0", UNKNOWN_ERA, True)
    first = Branch("job-0-aa")
    forked = Lineage().begin("job-1-bb", "job-0-aa.0", 20)
    lineage = Lineage.of([near, far, later], [first, Branch("job-1-bb", UNKNOWN_ERA, forked.forks)])
    assert lineage.why_superseded("job-0-aa.0") is None
    assert lineage.why_superseded("job-1-bb.0") is None
    why = lineage.why_superseded("job-0-aa.1")
    assert why is not None
    assert "iteration 20" in why
    assert "iteration 26" in why
    unknown = SavedPoint(30, "job-9-zz.0", UNKNOWN_ERA, False)
    assert (
        Lineage.of([unknown, later], [Branch("job-1-bb", UNKNOWN_ERA, forked.forks)]).why_superseded("job-9-zz.0")
        is None
    )


def test_manifest_size_is_bounded_over_1000_restarts() -> None:
    """A branch records its newest forks only, and checkpoints older than those are not excluded."""
    lineage = Lineage()
    branch = lineage.begin("job-0-aa", None, 0)
    points = [SavedPoint(1, "job-0-aa.0", branch.era, True)]
    for cycle in range(1, 1001):
        lineage = Lineage.of(points[-1:], [branch])
        branch = lineage.begin(f"job-{cycle}-aa", points[-1].attempt, points[-1].iteration)
        points.append(SavedPoint(cycle + 1, f"job-{cycle}-aa.0", branch.era, True))
    assert len(branch.forks) == MAX_FORKS
    lineage = Lineage.of(points, [branch])
    assert not [point for point in points if lineage.why_superseded(point.attempt)]
