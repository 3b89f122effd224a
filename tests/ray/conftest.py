"""One Ray cluster for all tests, and nothing of it left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from ray_machines import run_ray


@pytest.fixture(autouse=True)
def no_process_left_behind() -> None:
    """Leave alone what Ray keeps between tests; ``ray_cluster`` ends all of it."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Run a cluster with room for 16 actors on its first node; tests may add nodes, and remove those again."""
    with run_ray() as cluster:
        yield cluster
