"""Every Python block of the documentation page about Ray runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import MEGATRON, blocks_of
from ray.cluster_utils import Cluster

import outlast
import outlast.ray

pytestmark = pytest.mark.extended

LOOP = "for step in group.steps(total=1000):"
LIMIT_S = 300.0


def test_every_block_is_executed(tmp_path: Path) -> None:
    """Blocks of settings are executed here; the loop and Megatron-Core's actor are executed by the tests that select
    them."""
    executed = 0
    for block in blocks_of("ray.md"):
        if LOOP in block or MEGATRON in block:
            continue
        exec(compile(block, "docs/ray.md", "exec"), {"outlast": outlast})
        executed += 1
    assert executed == len(blocks_of("ray.md")) - 2


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.campaign
def test_the_loop_of_the_page_runs(ray_cluster: Cluster, tmp_path: Path) -> None:
    """The page's first script trains on this cluster unchanged, but for fewer steps and another folder."""
    (script,) = [block for block in blocks_of("ray.md") if LOOP in block]
    for text, instead in ((LOOP, LOOP.replace("1000", "3")), ("/local/ckpt", str(tmp_path / "ckpt"))):
        assert text in script
        script = script.replace(text, instead)
    path = tmp_path / "train.py"
    path.write_text(script + "\n    print('iteration', group.iteration, len(group.recoveries))\n")
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "iteration 3 0" in done.stdout
    assert list((tmp_path / "ckpt").iterdir())
