"""One Ray cluster for each module of tests, and nothing of it left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from outlast.testing.reaping import TOKEN, end_processes

_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
_PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
"""Actors import their classes from the tests' own modules."""
_SYSTEM_CONFIG = {"prestart_worker_first_driver": False}
"""No worker is started before somebody needs it: two cores have enough to do."""


@pytest.fixture(autouse=True)
def no_process_left_behind() -> None:
    """Leave alone what Ray keeps between tests; ``ray_cluster`` ends all of it."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Cluster]:
    """Run a cluster with room for 16 actors on its first node; tests may add nodes, and remove those again."""
    token, temp_dir = uuid.uuid4().hex, tempfile.mkdtemp(prefix="olr-", dir="/tmp")
    environment = _ENVIRONMENT | {TOKEN: token, "RAY_TMPDIR": temp_dir, "PYTHONPATH": _PYTHONPATH}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    os.mkdir(f"{temp_dir}/ray")
    cluster = None
    try:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 16,
                "num_gpus": 0,
                "object_store_memory": 150 << 20,
                "include_dashboard": False,
                "_system_config": _SYSTEM_CONFIG,
            },
        )
        ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING", namespace=token)
        yield cluster
    finally:
        try:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
        finally:
            end_processes(token)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            shutil.rmtree(temp_dir, ignore_errors=True)
