"""The log line about the failures that a run is protected against."""

from __future__ import annotations

import pytest

from outlast.config import FaultToleranceConfig
from outlast.policy.deadlines import NOT_YET, Protection, Timeouts, describe_hangs, describe_nodes, describe_saves

ORIGINS = dict.fromkeys(
    (
        "rank_section_timeouts",
        "rank_out_of_section_timeout",
        "initial_rank_heartbeat_timeout",
        "rank_heartbeat_timeout",
    ),
    "outlast.toml",
)
STEP = Timeouts.from_config(FaultToleranceConfig(rank_section_timeouts={"step": 180.0}))


def test_complete_protection_line() -> None:
    """The line covers worker deaths, hangs, lost nodes, checkpoints and preemption, each with yes or no and its
    basis."""
    protection = Protection(
        max_restarts=3,
        hangs=describe_hangs(STEP, "default", has_session=True, origins=ORIGINS),
        nodes=describe_nodes(num_slots=1, max_nodes=1, min_nodes=None, num_spares=0),
        of_session=describe_saves(tiers=("memory", "/ckpt"), interval=200, near_interval=0, is_notified=True),
    )
    assert protection.describe() == (
        "protected: death yes (3 restarts); hang yes (step 180 s from outlast.toml); node loss no (no spare node); "
        "checkpoints every 200 iterations to memory + /ckpt; preemption yes"
    )
    assert not protection.has_gap


@pytest.mark.parametrize(
    ("max_restarts", "hangs", "session"),
    [
        (0, "yes (heartbeat 1800 s from default)", "checkpoints every 2 iterations to memory; preemption yes"),
        (3, "no (enable_ft_package is false, option)", "checkpoints every 2 iterations to memory; preemption yes"),
        (3, "yes (heartbeat 1800 s from default)", "checkpoints no (set checkpoint.directory); preemption yes"),
    ],
)
def test_disabled_protection_is_a_warning(max_restarts: int, hangs: str, session: str) -> None:
    """No restarts, no hang detection or no saves turn the line into a warning."""
    assert Protection(max_restarts=max_restarts, hangs=hangs, nodes="no", of_session=session).has_gap


def test_missing_session_is_reported() -> None:
    """A script without a session is reported with neither hang detection nor checkpoints."""
    hangs = describe_hangs(STEP, "default", has_session=False, origins=ORIGINS)
    line = Protection(max_restarts=1, hangs=hangs, nodes="no (no spare node)").describe()
    assert "death yes (1 restart); hang no (the script has called neither outlast.init()" in line
    assert "checkpoints and preemption unknown" in line


@pytest.mark.parametrize(
    ("slots", "most", "least", "spares", "text"),
    [
        (4, 5, None, 1, "yes (1 spare)"),
        (4, 6, 3, 2, "yes (2 spares, continues with 3 of 4 nodes)"),
        (4, 6, 3, 0, "yes (continues with 3 of 4 nodes)"),
        (4, 6, None, 0, "no (none of up to 2 spares is here)"),
        (4, 4, 4, 0, "no (no spare node)"),
    ],
)
def test_lost_node_protection_needs_spares_or_shrinking(
    slots: int, most: int, least: int | None, spares: int, text: str
) -> None:
    """Waiting spares and a smaller permitted world protect against a lost node; an absent spare does not count."""
    assert describe_nodes(num_slots=slots, max_nodes=most, min_nodes=least, num_spares=spares) == text


def test_session_is_unknown_before_it_can_open() -> None:
    """Before a script had time to open a session, the line reports neither its presence nor its absence."""
    hangs = describe_hangs(STEP, "default", has_session=None, origins=ORIGINS)
    protection = Protection(max_restarts=1, hangs=hangs, nodes="no (no spare node)", why_unknown=NOT_YET)
    assert protection.describe().count("unknown (the script has not called outlast.init() yet)") == 2
    assert not protection.has_gap


@pytest.mark.parametrize(
    ("tiers", "interval", "near", "reported", "text"),
    [
        ((), 5, 0, True, "checkpoints no (set checkpoint.directory); preemption no (nothing is saved)"),
        (
            ("/c",),
            0,
            0,
            True,
            "checkpoints no (none before the end: set checkpoint.save_interval; to /c); preemption yes",
        ),
        (("/c",), "auto", 0, True, "checkpoints at automatic intervals to /c; preemption yes"),
        (
            ("memory", "/c"),
            100,
            10,
            False,
            "checkpoints every 100 iterations and every 10 iterations to the node-local tiers to memory + /c; "
            "preemption no (outlast.init() was not called in the main thread)",
        ),
    ],
)
def test_save_interval_tiers_and_preemption_are_reported(
    tiers: tuple[str, ...], interval: int | str, near: int | str, reported: bool, text: str
) -> None:
    """The line contains the save interval, the tiers and whether a preemption notice leads to a save."""
    assert describe_saves(tiers=tiers, interval=interval, near_interval=near, is_notified=reported) == text
