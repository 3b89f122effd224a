"""The checkpointing examples behave as their README describes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.testing.ranks import free_port

pytestmark = pytest.mark.extended

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "checkpointing"
AWS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def _run(script: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run an example to its end and return its output lines in order."""
    completed = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        timeout=250,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


def _index(lines: list[str], pattern: str) -> int:
    (found,) = [index for index, line in enumerate(lines) if re.search(pattern, line)]
    return found


@pytest.mark.slow
@pytest.mark.process
def test_training_continues_during_a_save(tmp_path: Path) -> None:
    """Iterations run between the saved one and the log line of the completed save, which contains the tier; a
    restart resumes from the newest checkpoint."""
    lines = _run("asynchronous.py", str(tmp_path), "--iterations", "200").splitlines()
    done = _index(lines, r"^iteration 100 ")
    saved = _index(lines, r"saved iteration 100 to global in ")
    between = [line for line in lines[done + 1 : saved] if line.startswith("iteration")]
    assert between, lines
    restarted = _run("asynchronous.py", str(tmp_path), "--iterations", "250").splitlines()
    _index(restarted, r"loaded iteration 200 ")
    assert next(line for line in restarted if line.startswith("iteration")).startswith("iteration 210")


@pytest.mark.slow
@pytest.mark.process
def test_lost_nodes_rank_resumes_from_its_replica(tmp_path: Path) -> None:
    """One of two agents is killed and its disk deleted. The spare's rank resumes from the replica on the other node,
    the surviving rank from its memory or local tier, both at the same iteration; training completes."""
    output = _run("replicated.py", str(tmp_path))
    first = re.search(
        r"^rank 0 on (\S+) resumed from iteration (\d+): [\d,]+ bytes from (?:memory|local)$", output, re.MULTILINE
    )
    second = re.search(
        r"^rank 1 on (\S+) resumed from iteration (\d+): [\d,]+ bytes from replica$", output, re.MULTILINE
    )
    assert first, output
    assert second, output
    assert first[2] == second[2]
    assert int(first[2]) >= 40
    lost = re.search(r"^(\S+), which carried rank 1, is gone", output, re.MULTILINE)
    assert lost, output
    assert lost[1] not in (first[1], second[1])
    codes = dict(re.findall(r"(node-\d) (-?\d+)", output.splitlines()[-1]))
    assert codes == {first[1]: "0", second[1]: "0", lost[1]: "-9"}


@pytest.fixture
def object_store() -> Iterator[dict[str, str]]:
    """Start an S3 server with a bucket; yield the environment variables of its endpoint."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **AWS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                assert process.poll() is None, "the server exited"
                assert time.monotonic() < end, "the server does not respond"
                time.sleep(0.05)
        environment = {**AWS, "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        _client(environment).create_bucket(Bucket="bucket")
        yield environment
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.campaign
@pytest.mark.process
def test_object_store_url_replaces_the_directory(tmp_path: Path, object_store: dict[str, str]) -> None:
    """Checkpoints are stored in the bucket, in the format of ``torch.distributed.checkpoint``; a restart with the
    same URL resumes from the newest."""
    _run("s3.py", "s3://bucket/my-run", "--iterations", "20", environment=object_store)
    names = [one["Key"] for one in _client(object_store).list_objects_v2(Bucket="bucket")["Contents"]]
    assert {"my-run/step-20/manifest.json", "my-run/step-20/.metadata"} <= set(names)
    assert any(name.endswith(".distcp") for name in names)
    restarted = _run("s3.py", "s3://bucket/my-run", "--iterations", "30", environment=object_store)
    assert re.search(r"loaded iteration 20 .*1 from global", restarted), restarted
    assert "iteration  30" in restarted


def _client(environment: dict[str, str]) -> Any:
    """Return a botocore client, independent of outlast."""
    session = pytest.importorskip("botocore.session").get_session()
    return session.create_client(
        "s3",
        endpoint_url=environment["FSSPEC_S3_ENDPOINT_URL"],
        region_name=environment["AWS_DEFAULT_REGION"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
    )
