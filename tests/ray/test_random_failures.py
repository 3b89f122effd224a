"""Random sequences of failures end with the weights of an undisturbed run, or with the error that says why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from random_failures import LIMIT_S, Stage, play
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def stage(ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(ray_cluster, tmp_path_factory.mktemp("failures"))
    yield stage
    assert not stage.give_up()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(4, 44))])
def test_a_sequence_converges_or_says_why_not(stage: Stage, seed: int) -> None:
    """Whatever fails, the group comes to the right weights or stops with a typed error, and leaves nothing behind."""
    outcome = play(seed, stage)
    assert outcome["verdict"] in ("converged", "stopped"), outcome
