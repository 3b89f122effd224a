"""The default number of consecutive failures that stop a job depends on the number of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launch.options import check_values
from outlast.policy.recovery_policy import Limits, failures_in_a_row
from outlast.simulate.run import simulate
from outlast.simulate.scenario import Scenario


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 16))
def test_more_nodes_never_allow_fewer_failures(num_nodes: int, more: int) -> None:
    """The default is 3 on up to 4,096 nodes, and never decreases with more nodes."""
    assert 3 <= failures_in_a_row(num_nodes) <= failures_in_a_row(num_nodes + more)
    assert num_nodes > 4096 or failures_in_a_row(num_nodes) == 3


@pytest.mark.parametrize(
    ("options", "restarts", "cycles"),
    [
        (["--nnodes=1"], 3, 3),
        (["--nnodes=16384"], 6, 6),
        (["--nnodes=16384", "--max-restarts=2"], 2, 6),
        (["--nnodes=16384", "--ft-max-no-progress-cycles=1"], 6, 1),
    ],
)
def test_explicit_limits_override_the_size_defaults(options: list[str], restarts: int, cycles: int) -> None:
    """The limits follow from the number of nodes unless the command line or the script's config sets them."""
    checked = check_values([*options, "--rdzv-endpoint=10.0.0.1:29400", "train.py"])
    assert checked.command.args.max_restarts == restarts
    assert checked.layers.config.max_no_progress_cycles == cycles
    with_script = checked.layers.with_script('{"max_no_progress_cycles": 2}')
    assert with_script.config.max_no_progress_cycles == (1 if cycles == 1 else 2)


@pytest.mark.slow
def test_random_failures_do_not_stop_a_large_run() -> None:
    """In a month of 16,384 nodes consecutive random failures do not stop the run; a limit of three would."""
    scenario = Scenario(num_ranks=131072)
    assert scenario.limits_in_force == Limits(max_restarts=6, max_no_progress_cycles=6)
    few = scenario.change(max_restarts=3, max_no_progress_cycles=3)
    assert [sum(len(simulate(one, seed).stops) > 0 for seed in range(2)) for one in (scenario, few)] == [0, 2]
