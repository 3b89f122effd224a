"""One Ray cluster for all tests; its processes are ended after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from ray_machines import run_ray


@pytest.fixture(autouse=True)
def no_process_left_behind() -> None:
    """Do not end Ray's processes after each test; ``ray_cluster`` ends all of them."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Run a cluster with room for 16 actors on its first node; tests may add nodes and remove them again."""
    with run_ray() as cluster:
        yield cluster
