"""How many failures in a row stop a job by default: it depends on the number of nodes."""

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
    """Three at least, as always on up to 4,096 nodes, and never fewer on more nodes."""
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
def test_what_is_given_comes_before_the_size(options: list[str], restarts: int, cycles: int) -> None:
    """The limits of a command line follow from the number of nodes, unless it or the script's config gives them."""
    checked = check_values([*options, "--rdzv-endpoint=10.0.0.1:29400", "train.py"])
    assert checked.command.args.max_restarts == restarts
    assert checked.layers.config.max_no_progress_cycles == cycles
    with_script = checked.layers.with_script('{"max_no_progress_cycles": 2}')
    assert with_script.config.max_no_progress_cycles == (1 if cycles == 1 else 2)


@pytest.mark.slow
def test_a_large_run_is_not_stopped_by_chance() -> None:
    """A month of 16,384 nodes: failures that come in a row by chance do not stop it; a limit of three would."""
    scenario = Scenario(num_ranks=131072)
    assert scenario.limits_in_force == Limits(max_restarts=6, max_no_progress_cycles=6)
    few = scenario.change(max_restarts=3, max_no_progress_cycles=3)
    assert [sum(len(simulate(one, seed).stops) > 0 for seed in range(2)) for one in (scenario, few)] == [0, 2]
