"""A group of actors saves to Google Cloud Storage; the next group resumes from there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_trainer import Trainer, batch_of, weights_after

from outlast import CheckpointConfig
from outlast.ray import ActorGroup

pytestmark = [pytest.mark.overlay, pytest.mark.process, pytest.mark.slow]


def gcs_server(bucket: str) -> Any:
    """Start the server that the tests of object stores use."""
    path = Path(__file__).parent.parent / "dcp" / "gcs_server.py"
    spec = importlib.util.spec_from_file_location("gcs_server_of_dcp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GCSServer(bucket)


def test_a_second_group_resumes_from_gcs(ray_cluster: object, tmp_path: Path) -> None:
    """Two consecutive groups of different sizes train on one directory in a bucket, to the weights of one run."""
    server = gcs_server("actors")
    try:
        for life, dp in enumerate((2, 1)):
            with ActorGroup(
                Trainer,
                {"dp": dp},
                args=(str(tmp_path),),
                checkpoint=CheckpointConfig(directory="gs://actors/run", save_interval=1, async_save=False),
                runtime_env={"env_vars": server.environment},
            ) as group:
                assert group.iteration == 3 * life
                for iteration in range(3 * life + 1, 3 * life + 4):
                    group.run("train_step", batch_of(iteration), iteration)
                weights = group.run("weights", dispatch="pass_through")
        torch.testing.assert_close(weights[0], weights_after(6, dp=1, tp=1)[0], rtol=0, atol=1e-12)
        assert {name.split("/")[1] for name in server.objects("run/")} >= {"step-6", "latest"}
    finally:
        server.kill()
