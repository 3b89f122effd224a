"""The files that submit ``examples/ray_job`` refer to existing files and options."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_job"
# Of https://docs.anyscale.com/reference/job-api, fields that the example may need.
FIELDS = {"name", "entrypoint", "working_dir", "requirements", "env_vars", "max_retries", "compute_config", "image_uri"}


def test_the_anyscale_job_equals_the_ray_job() -> None:
    """``job.yaml`` has only Anyscale's fields, starts the script with valid arguments, and sets the variables of
    ``runtime_env.yaml``."""
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    assert job.keys() <= FIELDS
    assert job["env_vars"] == yaml.safe_load((EXAMPLE / "runtime_env.yaml").read_text())["env_vars"]
    program, script, *arguments = job["entrypoint"].split()
    assert (program, (EXAMPLE / job["working_dir"] / script).is_file()) == ("python", True)
    known = (EXAMPLE / script).read_text()
    assert all(f'"{name}"' in known for name in arguments if name.startswith("--"))


@pytest.mark.process
def test_run_sh_prints_its_usage() -> None:
    """Without an address and a location for checkpoints no job is submitted: exit code 2 and one line."""
    done = subprocess.run([EXAMPLE / "run.sh", "http://x"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
