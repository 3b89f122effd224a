"""Slow ranks are named, in time and nobody else; what cannot be compared is said."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timings import SECTIONS, MadeRanks, fast_summary, tell

from outlast.config import StragglerDetectionConfig
from outlast.policy.slowness import OUTSIDE, Basis, RankTimings, Timing, lower_median, summarise
from outlast.policy.stragglers import Findings, Scope, Streaks, judge

CONFIG = StragglerDetectionConfig(enabled=True)
ALL = [range(4)]


def judge_windows(made: MadeRanks, num_windows: int, **changed: object) -> list[Findings]:
    """Judge windows one after the other; the made ranks remember nothing of earlier calls but their pace."""
    streaks, found = Streaks(), []
    for _ in range(num_windows):
        streaks, findings = judge(streaks, made.window(**changed), CONFIG)
        found.append(findings)
    return found


@pytest.mark.parametrize(
    "num_windows", [300, pytest.param(10_000, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])]
)
def test_nobody_is_named_in_10000_quiet_windows(num_windows: int) -> None:
    """Jitter, heavy tails, drift and busy windows name nobody, relatively or individually."""
    made = MadeRanks(seed=1, meet_in={"backward": ALL})
    streaks = Streaks()
    for number in range(num_windows):
        streaks, findings = judge(streaks, made.window(), CONFIG)
        assert not findings.named, (number, findings.named)
        assert findings.why_nobody


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_a_rank_slowed_1_3_times_is_named_within_three_windows(seed: int, num_ranks: int) -> None:
    """It is named relatively and individually, in the third window at the latest; the others never are."""
    everybody = [range(num_ranks)]
    made = MadeRanks(num_ranks=num_ranks, seed=seed, meet_in={"backward": everybody})
    calm = judge_windows(made, 5)
    assert not any(findings.named for findings in calm)
    root_cause = seed % num_ranks
    found = judge_windows(made, 6, slowed={(root_cause, "*"): 1.3}, busy_chance=0)
    assert all(set(findings.named_ranks) <= {root_cause} for findings in found)
    bases = {one.basis for one in found[2].named}
    # Of two ranks one is all that there is to compare a slowdown with: its own jitter may hide it.
    assert bases == {Basis.RELATIVE, Basis.INDIVIDUAL} if num_ranks > 2 else Basis.RELATIVE in bases
    assert found[2].newly_named == (root_cause,)
    assert found[3].newly_named == ()
    assert not found[1].named
    assert found[1].suspects[0].rank == root_cause


def test_the_worst_score_is_the_slow_ranks() -> None:
    """Scores are from 0 to 1, and the slow rank's are the smallest."""
    made = MadeRanks(seed=3)
    judge_windows(made, 4)
    findings = judge_windows(made, 1, slowed={(2, "*"): 1.3})[0]
    for scores in (findings.relative, findings.individual):
        assert sorted(scores) == [0, 1, 2, 3]
        assert all(0 < score <= 1 for score in scores.values())
        assert min(scores, key=lambda rank: scores[rank]) == 2
    assert findings.relative[2] == pytest.approx(1 / 1.3, abs=0.06)


@pytest.mark.parametrize("factor", [1.3, 3.0])
def test_if_everybody_is_slow_nobody_is_named(factor: float) -> None:
    """A slowdown of all ranks names nobody, and the reason says that all are slower than at their best."""
    made = MadeRanks(seed=5)
    judge_windows(made, 5)
    found = judge_windows(made, 5, slowed={(rank, "*"): factor for rank in range(4)})
    assert not any(findings.named or findings.suspects for findings in found)
    assert "4 of 4 ranks are slower than at their best" in found[-1].why_nobody


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("pair", [(0, 1), (2, 3), (1, 2)])
def test_a_rank_that_waits_for_a_slow_one_is_not_named(seed: int, pair: tuple[int, int]) -> None:
    """Two ranks meet in ``backward`` and one of them is slow in ``forward``: the other one's ``backward`` takes as much
    longer, and it is said to wait."""
    root_cause, victim = pair if seed % 2 else reversed(pair)
    others = [[rank] for rank in range(4) if rank not in pair]
    made = MadeRanks(seed=seed, meet_in={"backward": [pair, *others]})
    judge_windows(made, 5)
    found = judge_windows(made, 5, slowed={(root_cause, "forward"): 1.8})
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
def test_of_one_slow_rank_no_other_is_ever_named(
    seed: int, num_ranks: int, section: str, factor: float, data: st.DataObject
) -> None:
    """Whoever is slow, in whatever section, and whoever waits for it in a later one: no other rank is named."""
    root_cause = data.draw(st.integers(0, num_ranks - 1))
    later = list(SECTIONS)[list(SECTIONS).index(section) + 1 :]
    meet_in = {}
    if later:
        with_whom = data.draw(st.sets(st.integers(0, num_ranks - 1)))
        rest = [[rank] for rank in range(num_ranks) if rank not in with_whom | {root_cause}]
        meet_in = {data.draw(st.sampled_from(later)): [sorted(with_whom | {root_cause}), *rest]}
    made = MadeRanks(num_ranks=num_ranks, seed=seed, meet_in=meet_in)
    judge_windows(made, 4)
    found = judge_windows(made, 4, slowed={(root_cause, section): factor})
    assert all(set(findings.named_ranks) <= {root_cause} for findings in found)


def test_waiting_for_a_slow_rank_costs_no_score() -> None:
    """The slow rank's score is the smallest, also where the others spend as much time waiting for it as it works."""
    ranks = [
        tell(rank, {"forward": 0.01 + 0.03 * (rank == 1), "backward": 0.04 - 0.03 * (rank == 1)}) for rank in (0, 1)
    ]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert [one.rank for one in findings.waiting] == [0]
    assert findings.relative[0] == 1.0
    assert findings.relative[1] < 0.5


def test_a_rank_that_is_ten_times_as_slow_is_not_hidden_by_its_own_variation() -> None:
    """Its four times differ by some 40 %, as those of the others do: also in a window of four steps it is slow."""
    shares = (0.6, 1.0, 1.4, 1.5)

    def timed(rank: int, middle_s: float) -> RankTimings:
        sections = (summarise("forward", [share * middle_s for share in shares]),)
        return RankTimings(rank=rank, node=f"node-{rank}", num_steps=4, step_s=4 * middle_s, sections=sections)

    def judged(*milliseconds: float) -> Findings:
        made = [timed(rank, value / 1e3) for rank, value in enumerate(milliseconds)]
        return judge(Streaks(), made, StragglerDetectionConfig(confirmations=1))[1]

    assert judged(1.0, 1.1, 10.0, 1.2).named_ranks == (2,)
    assert judged(1.0, 1.1, 1.5, 1.2).named_ranks == ()


def test_two_slow_ranks_of_four_are_both_named() -> None:
    """The lower median is the reference, so that half of the ranks may be slow; ranks that are slow alike say so."""
    made = MadeRanks(seed=7)
    found = judge_windows(made, 3, slowed={(1, "*"): 1.5, (3, "*"): 1.5})
    assert sorted(found[-1].named_ranks) == [1, 3]
    streaks = Streaks()
    for _ in range(3):
        same = [tell(rank, {"forward": 0.015 if rank in (1, 3) else 0.01}) for rank in range(4)]
        streaks, findings = judge(streaks, same, CONFIG)
    assert [one.alike for one in findings.named] == [(3,), (1,)]
    assert "one may be waiting for the other" in findings.named[0].describe()


def test_two_slow_ranks_of_four_are_not_named_where_the_others_differ_as_well() -> None:
    """10 and 12 ms are 20 % apart: that 20 and 21 are outliers is not sure, and said so; by 10 and 10.5 it is."""
    config = StragglerDetectionConfig(confirmations=1)

    def say(*milliseconds: float) -> Findings:
        made = [tell(rank, {"forward": value / 1e3}) for rank, value in enumerate(milliseconds)]
        return judge(Streaks(), made, config)[1]

    unsure = say(10, 12, 20, 21)
    assert unsure.named_ranks == ()
    assert unsure.why_nobody == (
        "rank 3 takes 1.75 times as long in 'forward', but the others differ too much among themselves for this to "
        "count as slow (3.0 of 4 standard deviations)"
    )
    assert set(say(10, 10.5, 20, 21).named_ranks) == {2, 3}


def test_one_fast_outlier_flags_nobody() -> None:
    """A rank that is fast does not make stragglers of all others."""
    ranks = [tell(rank, {"forward": 0.005 if rank == 0 else 0.01}) for rank in range(4)]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert findings.relative == dict.fromkeys(range(4), 1.0)
    assert not findings.suspects


@settings(max_examples=100)
@given(
    ranks_of=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    num_roles=st.integers(1, 2),
    data=st.data(),
)
def test_a_node_is_responsible_only_if_all_its_ranks_are_slow_compared_with_other_nodes(
    ranks_of: list[int], num_roles: int, data: st.DataObject
) -> None:
    """Whichever ranks are slow, wherever they are: the decision is about a node only if there are others, each of its
    ranks is slow, and a rank of another node does the same work and is not. Otherwise it is about the rank."""
    nodes = [f"node-{number}" for number, num_ranks in enumerate(ranks_of) for _ in range(num_ranks)]
    slowed = data.draw(st.sets(st.sampled_from(range(len(nodes)))))
    ranks = [
        tell(rank, {"forward": 0.03 if rank in slowed else 0.01}, node=node, role=f"stage-{rank % num_roles}")
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


def test_of_ranks_that_share_a_node_the_slow_one_is_identified_and_not_the_node() -> None:
    """One of two ranks of one host is slow: that is the rank. Both ranks of one of two nodes: that is the node."""

    def scope_of(slowed: set[int], *nodes: str) -> list[tuple[int, Scope, str]]:
        ranks = [
            tell(rank, {"forward": 0.03 if rank in slowed else 0.01}, node=node) for rank, node in enumerate(nodes)
        ]
        named = judge(Streaks(), ranks, StragglerDetectionConfig(confirmations=1))[1].named
        return [(one.rank, one.scope, one.scope_reason) for one in named]

    assert scope_of({1}, "a", "a") == [(1, Scope.RANK, "all ranks that are compared are on one node")]
    assert scope_of({3}, "a", "a", "b", "b") == [(3, Scope.RANK, "rank 2 of the same node is not slow")]
    both = "all its ranks (2, 3) are slow compared with ranks of other nodes"
    assert scope_of({2, 3}, "a", "a", "b", "b") == [(2, Scope.NODE, both), (3, Scope.NODE, both)]
    in_other_sections = [
        tell(rank, {"data": 0.03 if rank == 2 else 0.01, "forward": 0.2 if rank == 3 else 0.01}, node=node)
        for rank, node in enumerate("aabb")
    ]
    named = judge(Streaks(), in_other_sections, StragglerDetectionConfig(confirmations=1))[1].named
    assert [(one.rank, one.scope) for one in named] == [(3, Scope.RANK), (2, Scope.RANK)]
    assert scope_of({1}, "a", "b") == [(1, Scope.NODE, "its only rank is slow compared with ranks of other nodes")]


def test_time_outside_the_sections_is_attributed() -> None:
    """A rank that is slow in neither forward, backward nor optimizer is identified, with words for where it is; one
    evaluation that took minutes does not hide that another rank is slow in its forward."""
    config = StragglerDetectionConfig(confirmations=1)
    outside = [tell(rank, {"forward": 0.02, OUTSIDE: 0.03 if rank == 1 else 0.001}) for rank in range(2)]
    (one,) = judge(Streaks(), outside, config)[1].named
    assert one.section == OUTSIDE
    assert "takes 30.00 times as long outside forward, backward and optimizer as the median" in one.describe()
    rare = summarise(OUTSIDE, [0.001] * 9 + [600.0])
    ranks = [
        msgspec.structs.replace(one, sections=(*one.sections, rare))
        for one in (tell(rank, {"forward": 0.02 if rank == 1 else 0.01}) for rank in range(2))
    ]
    assert judge(Streaks(), ranks, config)[1].relative[1] == pytest.approx(0.5, abs=0.03)


def test_roles_are_compared_within_themselves() -> None:
    """A stage of a pipeline that does twice the work is no straggler; a slow rank within it is."""
    ranks = [
        tell(rank, {"forward": (0.02 if rank >= 3 else 0.01) * (1.5 if rank == 4 else 1)}, role=f"stage-{rank // 3}")
        for rank in range(6)
    ]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert [one.rank for one in findings.suspects] == [4]
    assert findings.relative[3] == 1.0
    assert findings.relative[4] == pytest.approx(1 / 1.5)


def test_a_section_that_a_rank_never_enters_is_said_and_hides_nothing() -> None:
    """The rank is compared in its other sections, and is named there when it is slow."""
    ranks = [tell(rank, {"data": 0.01, "forward": 0.01}) for rank in range(3)] + [tell(3, {"forward": 0.015})]
    streaks = Streaks()
    for _ in range(3):
        streaks, findings = judge(streaks, ranks, CONFIG)
    assert findings.notes == ("rank 3 never entered section 'data', which 3 of 4 ranks entered: not compared there",)
    assert findings.named_ranks == (3,)
    alone = [tell(0, {"forward": 0.01, "logging": 0.5})] + [tell(rank, {"forward": 0.01}) for rank in (1, 2, 3)]
    findings = judge(Streaks(), alone, CONFIG)[1]
    assert findings.notes == ("only rank 0 of 4 ranks entered section 'logging': nothing to compare with",)
    assert findings.relative[0] == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_timing_that_is_no_duration_is_said_and_left_out(bad: float) -> None:
    """NaN, infinity and negative times change no score, and are counted in a line."""
    broken = summarise("forward", [0.01] * 8 + [bad] * 2)
    assert (broken.count, broken.num_invalid, broken.median_s) == (8, 2, 0.01)
    ranks = [tell(rank, {"forward": 0.01}) for rank in range(3)]
    ranks.append(RankTimings(rank=3, num_steps=10, sections=(broken,)))
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert findings.relative == dict.fromkeys(range(4), 1.0)
    assert findings.notes == ("rank 3: 2 of 10 times of 'forward' are invalid (NaN, negative) and left out",)
    nothing = RankTimings(rank=3, num_steps=10, sections=(summarise("forward", [bad] * 5),))
    findings = judge(Streaks(), [*ranks[:3], nothing], CONFIG)[1]
    assert 3 not in findings.relative
    assert findings.notes == ("rank 3: 5 of 5 times of 'forward' are invalid (NaN, negative) and left out",)


def test_a_median_that_is_nan_is_said() -> None:
    """Even a rank that tells NaN as its median neither flags nor hides anybody."""
    ranks = [tell(rank, {"forward": 0.01}) for rank in range(3)]
    nan = Timing(name="forward", count=10, median_s=math.nan, total_s=math.nan)
    findings = judge(Streaks(), [*ranks, RankTimings(rank=3, num_steps=10, sections=(nan,))], CONFIG)[1]
    assert findings.notes == ("rank 3: all times of 'forward' are invalid (NaN, negative) and left out",)
    assert findings.relative == dict.fromkeys(range(3), 1.0)


def test_a_slowness_that_does_not_persist_names_nobody() -> None:
    """Two slow windows, a good one, two slow ones: nobody is named, and the reason counts the windows."""
    good = [tell(rank, {"forward": 0.01}) for rank in range(4)]
    bad = [*good[:3], tell(3, {"forward": 0.02})]
    streaks, counted = Streaks(), []
    for ranks in (bad, bad, good, bad, bad):
        streaks, findings = judge(streaks, ranks, CONFIG)
        assert not findings.named
        counted.append(findings.why_nobody)
    assert "rank 3 is slow in 'forward' (2.00 times), in 2 of the 3 windows in a row" in counted[1]
    assert counted[2].startswith("all ranks are within noise of each other")


def test_the_share_of_the_step_that_was_compared_is_reported() -> None:
    """Where nobody is slow in what can be compared, the reason says how little of a step that is: the rest may hide a
    node that is two times slower."""
    ranks = [msgspec.structs.replace(tell(rank, {"forward": 0.01}), pace_s=0.04) for rank in range(4)]
    reason = judge(Streaks(), ranks, CONFIG)[1].why_nobody
    assert reason == "all ranks are within noise of each other in what was compared, 25% of a step"
    unknown = [msgspec.structs.replace(one, pace_s=0.0, step_s=0.0) for one in ranks]
    assert judge(Streaks(), unknown, CONFIG)[1].why_nobody == "all ranks are within noise of each other"


def test_a_section_that_costs_nothing_names_nobody() -> None:
    """Three times as long in what is a thousandth of a step is not worth a name."""
    ranks = [tell(rank, {"tiny": 3e-5 if rank == 1 else 1e-5, "forward": 0.01}) for rank in range(4)]
    assert not judge(Streaks(), ranks, CONFIG)[1].suspects


def test_too_few_times_judge_nobody() -> None:
    """A window with two steps says that it is too little."""
    ranks = [
        RankTimings(rank=rank, num_steps=2, step_s=0.01, sections=(summarise("forward", [0.01 * (rank + 1)] * 2),))
        for rank in range(4)
    ]
    findings = judge(Streaks(), ranks, CONFIG)[1]
    assert not findings.suspects
    assert findings.why_nobody == "too little was timed: fewer than 3 times of each section"


def test_one_rank_alone_is_never_named() -> None:
    """There is nothing to tell a slow rank from slower work; its score is told all the same."""
    findings = judge(Streaks(), [tell(0, {"forward": 0.02}, best_forward=0.01)], CONFIG)[1]
    assert findings.individual == {0: 0.5}
    assert findings.why_nobody == "there is one rank, and nothing to compare it with"


def test_kernels_alone_name_a_slow_rank() -> None:
    """Where sections hide it, as all ranks wait in them, kernels tell."""

    def kernels(rank: int) -> tuple[Timing, ...]:
        factor = 1.4 if rank == 2 else 1.0 + rank / 200
        return tuple(summarise(f"kernel-{n}", [1e-4 * n * factor] * 20) for n in range(1, 6))

    ranks = [tell(rank, {"step": 0.1}, kernels=kernels(rank)) for rank in range(4)]
    streaks = Streaks()
    for _ in range(3):
        streaks, findings = judge(streaks, ranks, CONFIG)
    assert findings.named_ranks == (2,)
    assert findings.named[0].section == "kernels"
    assert findings.relative[2] == pytest.approx(1 / 1.4, abs=0.02)


def test_the_thresholds_say_whom_to_stop_for() -> None:
    """A rank at 1.3 times is named and not one to stop for at the default threshold of 0.7; at 1.6 times it is."""
    for factor, expected in ((1.3, ()), (1.6, (3,))):
        streaks = Streaks()
        for _ in range(3):
            ranks = [tell(rank, {"forward": 0.01 * (factor if rank == 3 else 1)}) for rank in range(4)]
            streaks, findings = judge(streaks, ranks, CONFIG)
        assert findings.named_ranks == (3,)
        assert findings.below_threshold == expected


def test_only_what_is_asked_for_is_calculated() -> None:
    """With one calculation off there are no scores of its kind, and nobody is named by it."""
    made = MadeRanks(seed=11)
    judge_windows(made, 4)
    slow = made.window(slowed={(1, "*"): 2.0})
    relative = judge(Streaks(), slow, StragglerDetectionConfig(calc_individual_gpu_perf=False))[1]
    individual = judge(Streaks(), slow, StragglerDetectionConfig(calc_relative_gpu_perf=False))[1]
    assert (bool(relative.relative), bool(relative.individual)) == (True, False)
    assert (bool(individual.relative), bool(individual.individual)) == (False, True)
    assert {one.basis for one in relative.suspects} == {Basis.RELATIVE}
    assert {one.basis for one in individual.suspects} == {Basis.INDIVIDUAL}


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30))
def test_the_lower_median_is_a_value_that_half_are_not_below(values: list[float]) -> None:
    """At least half of the values are as large, and at least half as small or almost so."""
    middle = lower_median(values)
    assert middle in values
    assert sum(value >= middle for value in values) * 2 >= len(values)
    assert sum(value <= middle for value in values) * 2 >= len(values)


def test_the_tests_summary_is_the_real_one() -> None:
    """What made-up windows are summarised with gives what ranks tell."""
    times = MadeRanks(num_steps=31).steps()["forward"][0]
    ours, theirs = fast_summary("forward", times, 0.0), summarise("forward", times.tolist())
    assert (ours.count, ours.median_s, ours.spread_s) == (theirs.count, theirs.median_s, theirs.spread_s)
    assert ours.total_s == pytest.approx(theirs.total_s)


def test_many_ranks_are_judged_quickly_enough_to_be_judged_at_all() -> None:
    """A thousand ranks: the slow one is found among them."""
    ranks = [tell(rank, {"forward": 0.013 if rank == 700 else 0.01 + rank % 7 * 1e-5}) for rank in range(1000)]
    streaks = Streaks()
    for _ in range(3):
        streaks, findings = judge(streaks, ranks, CONFIG)
    assert findings.named_ranks == (700,)
