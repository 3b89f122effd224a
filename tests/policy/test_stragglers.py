"""Slow ranks are reported in time and without false alarms, and times that cannot be compared are reported."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timings import SECTIONS, SimulatedRanks, report_timings, summarise_fast

from outlast.config import StragglerDetectionConfig
from outlast.policy.slowness import OUTSIDE, Basis, RankTimings, Timing, lower_median, summarise
from outlast.policy.stragglers import Findings, Scope, Streaks, judge

CONFIG = StragglerDetectionConfig(enabled=True)
ALL = [range(4)]


def judge_windows(simulated: SimulatedRanks, num_windows: int, **changed: object) -> list[Findings]:
    """Judge windows one after the other; the simulated ranks keep only their pace between calls."""
    streaks, found = Streaks(), []
    for _ in range(num_windows):
        streaks, findings = judge(streaks, simulated.window(**changed), CONFIG)
        found.append(findings)
    return found


@pytest.mark.parametrize(
    "num_windows", [300, pytest.param(10_000, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])]
)
def test_no_rank_is_reported_in_10000_quiet_windows(num_windows: int) -> None:
    """Jitter, heavy tails, drift and busy windows cause no relative or individual finding."""
    simulated = SimulatedRanks(seed=1, meet_in={"backward": ALL})
    streaks = Streaks()
    for number in range(num_windows):
        streaks, findings = judge(streaks, simulated.window(), CONFIG)
        assert not findings.named, (number, findings.named)
        assert findings.why_none


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_rank_slowed_by_1_3_is_reported_in_three_windows(seed: int, num_ranks: int) -> None:
    """The slow rank is reported relatively and individually in the third window at the latest; the others never are."""
    all_ranks = [range(num_ranks)]
    simulated = SimulatedRanks(num_ranks=num_ranks, seed=seed, meet_in={"backward": all_ranks})
    steady = judge_windows(simulated, 5)
    assert not any(findings.named for findings in steady)
    root_cause = seed % num_ranks
    found = judge_windows(simulated, 6, slowed={(root_cause, "*"): 1.3}, busy_chance=0)
    assert all(set(findings.named_ranks) <= {root_cause} for findings in found)
    bases = {one.basis for one in found[2].named}
    # With two ranks, the jitter of the only reference may hide a slowdown.
    assert bases == {Basis.RELATIVE, Basis.INDIVIDUAL} if num_ranks > 2 else Basis.RELATIVE in bases
    assert found[2].newly_named == (root_cause,)
    assert found[3].newly_named == ()
    assert not found[1].named
    assert found[1].suspects[0].rank == root_cause


def test_slow_rank_has_the_worst_score() -> None:
    """Scores are from 0 to 1, and the slow rank's are the smallest."""
    simulated = SimulatedRanks(seed=3)
    judge_windows(simulated, 4)
    findings = judge_windows(simulated, 1, slowed={(2, "*"): 1.3})[0]
    for scores in (findings.relative, findings.individual):
        assert sorted(scores) == [0, 1, 2, 3]
        assert all(0 < score <= 1 for score in scores.values())
        assert min(scores, key=lambda rank: scores[rank]) == 2
    assert findings.relative[2] == pytest.approx(1 / 1.3, abs=0.06)


@pytest.mark.parametrize("factor", [1.3, 3.0])
def test_slowdown_of_all_ranks_reports_no_rank(factor: float) -> None:
    """A slowdown of all ranks identifies no rank, and the reason states that all are slower than at their best."""
    simulated = SimulatedRanks(seed=5)
    judge_windows(simulated, 5)
    found = judge_windows(simulated, 5, slowed={(rank, "*"): factor for rank in range(4)})
    assert not any(findings.named or findings.suspects for findings in found)
    assert "4 of 4 ranks are slower than at their best" in found[-1].why_none


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("pair", [(0, 1), (2, 3), (1, 2)])
def test_waiting_rank_is_not_reported(seed: int, pair: tuple[int, int]) -> None:
    """Two ranks meet in ``backward`` and one is slow in ``forward``: the ``backward`` of the other takes as much longer
    and is reported as waiting."""
    root_cause, victim = pair if seed % 2 else reversed(pair)
    others = [[rank] for rank in range(4) if rank not in pair]
    simulated = SimulatedRanks(seed=seed, meet_in={"backward": [pair, *others]})
    judge_windows(simulated, 5)
    found = judge_windows(simulated, 5, slowed={(root_cause, "forward"): 1.8})
    assert [findings.named_ranks for findings in found[2:]] == [(root_cause,)] * 3
    waiting = {(one.rank, one.section, one.for_rank, one.in_section) for findings in found for one in findings.waiting}
    assert (victim, "backward", root_cause, "forward") in waiting


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    num_ranks=st.integers(2, 8),
    section=st.sampled_from(["data", "forward", "backward", "optimizer"]),
    factor=st.floats(1.4, 4.0),
    data=st.data(),
)
def test_only_the_slow_rank_is_reported(
    seed: int, num_ranks: int, section: str, factor: float, data: st.DataObject
) -> None:
    """For every slow rank, section and set of ranks that wait for it later, no other rank is reported."""
    root_cause = data.draw(st.integers(0, num_ranks - 1))
    later = list(SECTIONS)[list(SECTIONS).index(section) + 1 :]
    meet_in = {}
    if later:
        with_whom = data.draw(st.sets(st.integers(0, num_ranks - 1)))
        rest = [[rank] for rank in range(num_ranks) if rank not in with_whom | {root_cause}]
        meet_in = {data.draw(st.sampled_from(later)): [sorted(with_whom | {root_cause}), *rest]}
    simulated = SimulatedRanks(num_ranks=num_ranks, seed=seed, meet_in=meet_in)
    judge_windows(simulated, 4)
    found = judge_windows(simulated, 4, slowed={(root_cause, section): factor})
    assert all(set(findings.named_ranks) <= {root_cause} for findings in found)


def test_waiting_does_not_lower_the_score() -> None:
    """The slow rank's score is the smallest, even if the others wait as long as it works."""
    ranks = [
        report_timings(rank, {"forward": 0.01 + 0.03 * (rank == 1), "backward": 0.04 - 0.03 * (rank == 1)})
        for rank in (0, 1)
    ]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert [one.rank for one in findings.waiting] == [0]
    assert findings.relative[0] == 1.0
    assert findings.relative[1] < 0.5


def test_tenfold_slowdown_is_reported_despite_variation() -> None:
    """With variations of 40 % in all ranks and a window of four steps, a rank slowed ten times is reported."""
    shares = (0.6, 1.0, 1.4, 1.5)

    def timed(rank: int, middle_s: float) -> RankTimings:
        sections = (summarise("forward", [share * middle_s for share in shares]),)
        return RankTimings(rank=rank, node=f"node-{rank}", num_steps=4, step_s=4 * middle_s, sections=sections)

    def judged(*milliseconds: float) -> Findings:
        simulated = [timed(rank, value / 1e3) for rank, value in enumerate(milliseconds)]
        return judge(Streaks(), simulated, StragglerDetectionConfig(confirmations=1))[1]

    assert judged(1.0, 1.1, 10.0, 1.2).named_ranks == (2,)
    assert judged(1.0, 1.1, 1.5, 1.2).named_ranks == ()


def test_two_slow_ranks_of_four_are_both_reported() -> None:
    """The lower median is the reference, so half of the ranks may be slow; the reason mentions the equally slow
    ranks."""
    simulated = SimulatedRanks(seed=7)
    found = judge_windows(simulated, 3, slowed={(1, "*"): 1.5, (3, "*"): 1.5})
    assert sorted(found[-1].named_ranks) == [1, 3]
    streaks = Streaks()
    for _ in range(3):
        same = [report_timings(rank, {"forward": 0.015 if rank in (1, 3) else 0.01}) for rank in range(4)]
        streaks, findings = judge(streaks, same, CONFIG)
    assert [one.equally_slow for one in findings.named] == [(3,), (1,)]
    assert "one may be waiting for the other" in findings.named[0].describe()


def test_differing_references_report_no_slow_rank() -> None:
    """With references of 10 and 12 ms, 20 and 21 ms are not certainly outliers, and the reason states that; with 10 and
    10.5 ms they are."""
    config = StragglerDetectionConfig(confirmations=1)

    def judge_times(*milliseconds: float) -> Findings:
        simulated = [report_timings(rank, {"forward": value / 1e3}) for rank, value in enumerate(milliseconds)]
        return judge(Streaks(), simulated, config)[1]

    uncertain = judge_times(10, 12, 20, 21)
    assert uncertain.named_ranks == ()
    assert uncertain.why_none == (
        "rank 3 takes 1.75 times as long in 'forward', but the others differ too much among themselves for this to "
        "count as slow (3.0 of 4 standard deviations)"
    )
    assert set(judge_times(10, 10.5, 20, 21).named_ranks) == {2, 3}


def test_fast_outlier_reports_no_other_rank() -> None:
    """A fast rank does not make stragglers of all others."""
    ranks = [report_timings(rank, {"forward": 0.005 if rank == 0 else 0.01}) for rank in range(4)]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert findings.relative == dict.fromkeys(range(4), 1.0)
    assert not findings.suspects


@settings(max_examples=100)
@given(
    ranks_of=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    num_roles=st.integers(1, 2),
    data=st.data(),
)
def test_node_is_responsible_only_if_all_its_ranks_are_slow(
    ranks_of: list[int], num_roles: int, data: st.DataObject
) -> None:
    """The scope is the node only if each of its ranks is slow, other nodes exist, and a rank of another node does the
    same work and is not slow; otherwise it is the rank."""
    nodes = [f"node-{number}" for number, num_ranks in enumerate(ranks_of) for _ in range(num_ranks)]
    slowed = data.draw(st.sets(st.sampled_from(range(len(nodes)))))
    ranks = [
        report_timings(rank, {"forward": 0.03 if rank in slowed else 0.01}, node=node, role=f"stage-{rank % num_roles}")
        for rank, node in enumerate(nodes)
    ]
    findings = judge(Streaks(), ranks, StragglerDetectionConfig(confirmations=1))[1]
    slow = set(findings.named_ranks)
    for one in findings.named:
        mates = {rank for rank, node in enumerate(nodes) if node == one.node}
        references = {
            rank
            for rank, node in enumerate(nodes)
            if node != one.node and rank % num_roles == one.rank % num_roles and rank not in slow
        }
        assert (one.scope == Scope.NODE) == (mates <= slow and bool(references))
        assert one.scope_reason
        about = "the node" if one.scope == Scope.NODE else "the rank (its process or GPU), not the node"
        assert f"the decision is about {about}: {one.scope_reason}" in one.describe()


def test_one_slow_rank_of_a_node_is_identified() -> None:
    """One slow rank of two on a host identifies the rank; two slow ranks of one of two nodes identify the node."""

    def scope_of(slowed: set[int], *nodes: str) -> list[tuple[int, Scope, str]]:
        ranks = [
            report_timings(rank, {"forward": 0.03 if rank in slowed else 0.01}, node=node)
            for rank, node in enumerate(nodes)
        ]
        named = judge(Streaks(), ranks, StragglerDetectionConfig(confirmations=1))[1].named
        return [(one.rank, one.scope, one.scope_reason) for one in named]

    assert scope_of({1}, "a", "a") == [(1, Scope.RANK, "all ranks that are compared are on one node")]
    assert scope_of({3}, "a", "a", "b", "b") == [(3, Scope.RANK, "rank 2 of the same node is not slow")]
    both = "all its ranks (2, 3) are slow compared with ranks of other nodes"
    assert scope_of({2, 3}, "a", "a", "b", "b") == [(2, Scope.NODE, both), (3, Scope.NODE, both)]
    in_other_sections = [
        report_timings(rank, {"data": 0.03 if rank == 2 else 0.01, "forward": 0.2 if rank == 3 else 0.01}, node=node)
        for rank, node in enumerate("aabb")
    ]
    named = judge(Streaks(), in_other_sections, StragglerDetectionConfig(confirmations=1))[1].named
    assert [(one.rank, one.scope) for one in named] == [(3, Scope.RANK), (2, Scope.RANK)]
    assert scope_of({1}, "a", "b") == [(1, Scope.NODE, "its only rank is slow compared with ranks of other nodes")]


def test_slowness_outside_sections_is_reported() -> None:
    """A rank that is slow outside its sections is reported with that location; one evaluation of minutes does not hide
    another rank that is slow in its forward."""
    config = StragglerDetectionConfig(confirmations=1)
    outside = [report_timings(rank, {"forward": 0.02, OUTSIDE: 0.03 if rank == 1 else 0.001}) for rank in range(2)]
    (one,) = judge(Streaks(), outside, config)[1].named
    assert one.section == OUTSIDE
    assert "takes 30.00 times as long outside forward, backward and optimizer as the median" in one.describe()
    rare = summarise(OUTSIDE, [0.001] * 9 + [600.0])
    ranks = [
        msgspec.structs.replace(one, sections=(*one.sections, rare))
        for one in (report_timings(rank, {"forward": 0.02 if rank == 1 else 0.01}) for rank in range(2))
    ]
    assert judge(Streaks(), ranks, config)[1].relative[1] == pytest.approx(0.5, abs=0.03)


def test_ranks_are_compared_within_their_role() -> None:
    """A pipeline stage with twice the work is not a straggler; a slow rank within it is."""
    ranks = [
        report_timings(
            rank, {"forward": (0.02 if rank >= 3 else 0.01) * (1.5 if rank == 4 else 1)}, role=f"stage-{rank // 3}"
        )
        for rank in range(6)
    ]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert [one.rank for one in findings.suspects] == [4]
    assert findings.relative[3] == 1.0
    assert findings.relative[4] == pytest.approx(1 / 1.5)


def test_missing_section_is_reported_and_hides_no_slow_rank() -> None:
    """The rank is compared in its other sections, and is reported if it is slow there."""
    ranks = [report_timings(rank, {"data": 0.01, "forward": 0.01}) for rank in range(3)] + [
        report_timings(3, {"forward": 0.015})
    ]
    streaks = Streaks()
    for _ in range(3):
        streaks, findings = judge(streaks, ranks, CONFIG)
    assert findings.notes == ("rank 3 never entered section 'data', which 3 of 4 ranks entered: not compared there",)
    assert findings.named_ranks == (3,)
    alone = [report_timings(0, {"forward": 0.01, "logging": 0.5})] + [
        report_timings(rank, {"forward": 0.01}) for rank in (1, 2, 3)
    ]
    findings = judge(Streaks(), alone, CONFIG)[1]
    assert findings.notes == ("only rank 0 of 4 ranks entered section 'logging': nothing to compare with",)
    assert findings.relative[0] == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_invalid_timings_are_reported_and_ignored(bad: float) -> None:
    """NaN, infinity and negative times change no score, and are counted in a reported line."""
    broken = summarise("forward", [0.01] * 8 + [bad] * 2)
    assert (broken.count, broken.num_invalid, broken.median_s) == (8, 2, 0.01)
    ranks = [report_timings(rank, {"forward": 0.01}) for rank in range(3)]
    ranks.append(RankTimings(rank=3, num_steps=10, sections=(broken,)))
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert findings.relative == dict.fromkeys(range(4), 1.0)
    assert findings.notes == ("rank 3: 2 of 10 times of 'forward' are invalid (NaN, negative) and left out",)
    nothing = RankTimings(rank=3, num_steps=10, sections=(summarise("forward", [bad] * 5),))
    findings = judge(Streaks(), [*ranks[:3], nothing], CONFIG)[1]
    assert 3 not in findings.relative
    assert findings.notes == ("rank 3: 5 of 5 times of 'forward' are invalid (NaN, negative) and left out",)


def test_nan_median_is_reported() -> None:
    """A rank that reports NaN as its median neither flags nor hides any rank."""
    ranks = [report_timings(rank, {"forward": 0.01}) for rank in range(3)]
    nan = Timing(name="forward", count=10, median_s=math.nan, total_s=math.nan)
    findings = judge(Streaks(), [*ranks, RankTimings(rank=3, num_steps=10, sections=(nan,))], CONFIG)[1]
    assert findings.notes == ("rank 3: all times of 'forward' are invalid (NaN, negative) and left out",)
    assert findings.relative == dict.fromkeys(range(3), 1.0)


def test_interrupted_slowness_reports_no_rank() -> None:
    """Two slow windows, a good one and two slow ones report no rank, and the reason counts the windows."""
    good = [report_timings(rank, {"forward": 0.01}) for rank in range(4)]
    bad = [*good[:3], report_timings(3, {"forward": 0.02})]
    streaks, counted = Streaks(), []
    for ranks in (bad, bad, good, bad, bad):
        streaks, findings = judge(streaks, ranks, CONFIG)
        assert not findings.named
        counted.append(findings.why_none)
    assert "rank 3 is slow in 'forward' (2.00 times), in 2 of the 3 windows in a row" in counted[1]
    assert counted[2].startswith("all ranks are within noise of each other")


def test_compared_share_of_the_step_is_reported() -> None:
    """If no rank is slow in the compared time, the reason contains its share of the step: the rest may hide a node that
    is two times slower."""
    ranks = [msgspec.structs.replace(report_timings(rank, {"forward": 0.01}), pace_s=0.04) for rank in range(4)]
    reason = judge(Streaks(), ranks, CONFIG)[1].why_none
    assert reason == "all ranks are within noise of each other in what was compared, 25% of a step"
    unknown = [msgspec.structs.replace(one, pace_s=0.0, step_s=0.0) for one in ranks]
    assert judge(Streaks(), unknown, CONFIG)[1].why_none == "all ranks are within noise of each other"


def test_negligible_section_reports_no_rank() -> None:
    """A section of a thousandth of a step that takes three times as long is not reported."""
    ranks = [report_timings(rank, {"tiny": 3e-5 if rank == 1 else 1e-5, "forward": 0.01}) for rank in range(4)]
    assert not judge(Streaks(), ranks, CONFIG)[1].suspects


def test_too_few_steps_report_no_rank() -> None:
    """A window with two steps is reported as too small."""
    ranks = [
        RankTimings(rank=rank, num_steps=2, step_s=0.01, sections=(summarise("forward", [0.01 * (rank + 1)] * 2),))
        for rank in range(4)
    ]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert not findings.suspects
    assert findings.why_none == "too little was timed: fewer than 3 times of each section"


def test_single_rank_is_never_reported() -> None:
    """A single rank cannot be distinguished from slower work; its score is reported all the same."""
    findings = judge(Streaks(), [report_timings(0, {"forward": 0.02}, best_forward=0.01)], CONFIG)[1]
    assert findings.individual == {0: 0.5}
    assert findings.why_none == "there is one rank, and nothing to compare it with"


def test_kernel_times_alone_identify_a_slow_rank() -> None:
    """If all ranks wait in their sections, kernel times identify the slow one."""

    def kernels(rank: int) -> tuple[Timing, ...]:
        factor = 1.4 if rank == 2 else 1.0 + rank / 200
        return tuple(summarise(f"kernel-{n}", [1e-4 * n * factor] * 20) for n in range(1, 6))

    ranks = [report_timings(rank, {"step": 0.1}, kernels=kernels(rank)) for rank in range(4)]
    streaks = Streaks()
    for _ in range(3):
        streaks, findings = judge(streaks, ranks, CONFIG)
    assert findings.named_ranks == (2,)
    assert findings.named[0].section == "kernels"
    assert findings.relative[2] == pytest.approx(1 / 1.4, abs=0.02)


def test_threshold_decides_which_rank_stops_the_run() -> None:
    """At the default threshold of 0.7 a rank at 1.3 times is reported but does not stop the run; one at 1.6 times
    does."""
    for factor, expected in ((1.3, ()), (1.6, (3,))):
        streaks = Streaks()
        for _ in range(3):
            ranks = [report_timings(rank, {"forward": 0.01 * (factor if rank == 3 else 1)}) for rank in range(4)]
            streaks, findings = judge(streaks, ranks, CONFIG)
        assert findings.named_ranks == (3,)
        assert findings.below_threshold == expected


def test_disabled_scores_are_not_calculated() -> None:
    """With one calculation off there are no scores of its kind, and it reports no rank."""
    simulated = SimulatedRanks(seed=11)
    judge_windows(simulated, 4)
    slow = simulated.window(slowed={(1, "*"): 2.0})
    relative = judge(Streaks(), slow, StragglerDetectionConfig(calc_individual_gpu_perf=False))[1]
    individual = judge(Streaks(), slow, StragglerDetectionConfig(calc_relative_gpu_perf=False))[1]
    assert (bool(relative.relative), bool(relative.individual)) == (True, False)
    assert (bool(individual.relative), bool(individual.individual)) == (False, True)
    assert {one.basis for one in relative.suspects} == {Basis.RELATIVE}
    assert {one.basis for one in individual.suspects} == {Basis.INDIVIDUAL}


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30))
def test_lower_median_splits_the_values(values: list[float]) -> None:
    """At least half of the values are as large, and at least about half as small."""
    middle = lower_median(values)
    assert middle in values
    assert sum(value >= middle for value in values) * 2 >= len(values)
    assert sum(value <= middle for value in values) * 2 >= len(values)


def test_fast_summary_equals_the_real_one() -> None:
    """The test's fast summary of simulated windows equals :func:`summarise`."""
    times = SimulatedRanks(num_steps=31).steps()["forward"][0]
    fast, real = summarise_fast("forward", times, 0.0), summarise("forward", times.tolist())
    assert (fast.count, fast.median_s, fast.spread_s) == (real.count, real.median_s, real.spread_s)
    assert fast.total_s == pytest.approx(real.total_s)


def test_slow_rank_among_1000_is_found() -> None:
    """The slow rank is found among a thousand ranks."""
    ranks = [
        report_timings(rank, {"forward": 0.013 if rank == 700 else 0.01 + rank % 7 * 1e-5}) for rank in range(1000)
    ]
    streaks = Streaks()
    for _ in range(3):
        streaks, findings = judge(streaks, ranks, CONFIG)
    assert findings.named_ranks == (700,)
