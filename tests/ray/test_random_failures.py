"""Random sequences of failures end with the weights of an undisturbed run, or with an error that has the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from random_failures import LIMIT_S, Stage, run_sequence
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def stage(ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(ray_cluster, tmp_path_factory.mktemp("failures"))
    yield stage
    assert not stage.close_group()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(4, 44))])
def test_random_failures_converge_or_end_with_an_error(stage: Stage, seed: int) -> None:
    """Whatever fails, the group reaches the right weights or stops with a typed error, and leaks nothing."""
    outcome = run_sequence(seed, stage)
    assert outcome["verdict"] in ("converged", "stopped"), outcome
