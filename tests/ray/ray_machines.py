"""A separate Ray cluster for tests, with a check for leaked resources."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from outlast import clock
from outlast.testing.ranks import TOKEN, end_processes

_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
_PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
"""Lets actors import their classes from the modules of the tests."""
_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "worker_niceness": 0,
}
"""Start workers only on demand, to save CPU time; detect a lost node soon; give actors their share of a busy
machine."""


_NUM_STARTS = 5


@contextmanager
def run_ray(num_cpus: int = 16) -> Iterator[Cluster]:
    """Run a cluster with room for ``num_cpus`` actors on its first node; more nodes may be added and removed."""
    token, temp_dir = uuid.uuid4().hex, tempfile.mkdtemp(prefix="olr-", dir="/tmp")
    environment = _ENVIRONMENT | {TOKEN: token, "RAY_TMPDIR": temp_dir, "PYTHONPATH": _PYTHONPATH}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    os.mkdir(f"{temp_dir}/ray")
    cluster = None
    try:
        cluster = _start(num_cpus, token)
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
            deadline = clock.now_s() + 10
            while os.path.exists(temp_dir) and clock.now_s() < deadline:  # Ray's processes write until they end
                shutil.rmtree(temp_dir, ignore_errors=True)


def _start(num_cpus: int, token: str) -> Cluster:
    """Start the first node, repeatedly: Ray itself gives up after 30 s, which a very busy machine may exceed."""
    arguments = {
        "num_cpus": num_cpus,
        "num_gpus": 0,
        "object_store_memory": 150 << 20,
        "include_dashboard": False,
        "_system_config": _SYSTEM_CONFIG,
    }
    for left in reversed(range(_NUM_STARTS)):
        try:
            return Cluster(initialize_head=True, head_node_args=arguments)
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            end_processes(token)
    raise AssertionError


def leaked(pids: Collection[int] = ()) -> list[str]:
    """Return resources that are still in use some seconds after all groups are closed; empty if there are none.

    Args:
        pids: Processes that were actors.
    """
    deadline = clock.now_s() + 100
    while True:
        left = [f"actor {name} {one['State']}" for name, one in actors().items() if one["State"] != "DEAD"]
        left += [
            f"placement group {name} {one['state']}"
            for name, one in placement_group_table().items()
            if one["state"] != "REMOVED"
        ]
        total, free = ray.cluster_resources().get("CPU", 0), ray.available_resources().get("CPU", 0)
        left += [f"{free} of {total} CPUs are free"] if free != total else []
        left += [f"process {pid}" for pid in pids if psutil.pid_exists(pid)]
        if not left or clock.now_s() >= deadline:
            return left
        time.sleep(0.1)
