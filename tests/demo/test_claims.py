"""What the demo claims of tiers, and what it says when a claim does not hold."""

from __future__ import annotations

from typing import Any

from outlast.demo.outcome import Account, Sources, unkept
from outlast.demo.plan import Deed
from outlast.incidents import IncidentKind
from outlast.policy.rerun import Finding


def row(
    kind: IncidentKind,
    victims: tuple[int, ...],
    tiers: str,
    *,
    read: dict[str, int] | None = None,
    rejected: dict[str, int] | None = None,
    **more: Any,
) -> Account:
    """Return an incident after which rank i came back from the tier with the i-th initial."""
    names = {"m": "memory", "l": "local", "r": "replica", "g": "global"}
    sources = Sources(
        tiers={rank: names[letter] for rank, letter in enumerate(tiers)}, bytes_read=read or {}, rejected=rejected or {}
    )
    facts: dict[str, Any] = {
        "cycle": 0,
        "node": "node-1",
        "rank": victims[0] if len(victims) == 1 else None,
        "fault": "a fault",
        "iteration": 33,
        "detected_after_s": 0.1,
        "evidence": "",
        "action": "restart_workers",
        "verdict": "",
        "restored_iteration": 30,
        "recovered_after_s": 1.0,
        "redone_iterations": 3,
        "sources": sources,
    }
    return Account(kind=kind, victims=victims, **{**facts, **more})


def invalid(deed: Deed, tiers: str | None, **more: Any) -> Account:
    """Return an invalid result of rank 2; one that cost a restart cost its node, too."""
    facts: dict[str, Any] = {"fault": str(deed), "restarts": 0, "action": "rerun_step", "finding": Finding.TRANSIENT}
    if deed == Deed.FLIP:
        facts |= {"restarts": 1, "action": "replace_node", "finding": Finding.PERSISTENT, "quarantined": ("node-1",)}
        facts |= {"named": "model.w", "struck": "model.w", "rank": 2}
    facts |= {"sources": None} if tiers is None else {}
    victims = (2, 3) if facts["restarts"] and more.get("quarantined") != () else (2,)
    return row(IncidentKind.INVALID_RESULT, victims, tiers or "", **{**facts, **more})


def lost(tiers: str, **more: Any) -> Account:
    return row(IncidentKind.NODE_LOST, (2, 3), tiers, **more)


def spoiled(tiers: str, **more: Any) -> Account:
    facts: dict[str, Any] = {"copies_spoiled": 4, "rejected": {"replica": 2}, "newest_global": 30}
    return lost(tiers, **{**facts, **more})


def test_what_came_from_where_it_should_is_not_told() -> None:
    """Memory or disk after a rank's death, replicas after a node's, the global tier when these are damaged."""
    died = row(IncidentKind.WORKER_DIED, (1,), "mmmm", read={"memory": 100})
    assert unkept([died, row(IncidentKind.WORKER_HUNG, (2,), "mmlm"), lost("mmrr"), spoiled("llgg")]) == ()
    assert unkept([spoiled("gggg", read={"global": 100}, restored_iteration=40)]) == ()


def test_invalid_results_that_were_handled_as_they_should_are_not_told() -> None:
    """A NaN that costs no restart, and a flipped bit whose tensor is named and whose node is out."""
    assert unkept([invalid(Deed.NAN, None), invalid(Deed.FLIP, "mmrr", read={"replica": 9})]) == ()


def test_invalid_results_that_were_taken_for_something_else_are_told() -> None:
    """A restart for a NaN, another tensor, nobody or another node quarantined, state from the global tier."""
    (restarted,) = unkept([invalid(Deed.NAN, "mmmm", restarts=1, action="restart_workers")])
    assert "found transient, and what was done was to restart workers" in restarted
    (named,) = unkept([invalid(Deed.FLIP, "mmrr", named="model.v")])
    assert "model.v was named instead of model.w" in named
    (kept,) = unkept([invalid(Deed.FLIP, "mmmm", quarantined=())])
    assert "node-1 should be quarantined, and not nobody" in kept
    (far,) = unkept([invalid(Deed.FLIP, "mmrr", read={"global": 5})])
    assert "5 bytes were read from the global tier" in far


def test_what_the_demo_did_not_cause_or_never_went_on_is_told_elsewhere() -> None:
    """Only the demo's own faults have claims, and only where there is a next cycle."""
    assert unkept([lost("gggg", fault=None), lost("gggg", sources=None)]) == ()


def test_bytes_of_the_global_tier_after_a_lost_node_are_told() -> None:
    """Whoever read them, and each rank of the node that came back from elsewhere."""
    told = unkept([lost("mmrg", read={"replica": 9, "global": 2_000_000})])
    assert told == (
        "a fault at iteration 33: 2.0 MB were read from the global tier",
        "a fault at iteration 33: rank 3 came back from global instead of replica",
    )
    (other,) = unkept([lost("gmrr", read={"global": 5})])
    assert "5 bytes were read from the global tier" in other
    (missing,) = unkept([lost("mmr")])
    assert "rank 3 came back from nowhere" in missing


def test_damaged_copies_that_are_not_rejected_are_told() -> None:
    """No copy to damage, a rank that loaded one, fewer rejections than ranks, an older generation than need be."""
    (nothing,) = unkept([spoiled("llgg", copies_spoiled=0)])
    assert "no copy on another node" in nothing
    loaded, few = unkept([spoiled("llrg", rejected={"replica": 1})])
    assert "rank 2 came back from replica instead of global" in loaded
    assert "1 damaged copies were rejected by 2 ranks" in few
    for restored in (20, None):
        (older,) = unkept([spoiled("llgg", restored_iteration=restored)])
        assert f"went on from {restored}, but the global tier held 30" in older
