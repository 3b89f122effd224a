"""Ten thousand foreign connections to a training run: they are refused in bounded memory, and the result is
bit-identical."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_control_connection import record

from outlast.errors import RendezvousError
from outlast.incidents import EventKind
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity, Occupant, WrongRun, ask, probe
from outlast.runtime.addresses import Endpoint, parse_endpoints
from outlast.runtime.run_key import KeySource, RunKey
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]
NUM_CONNECTIONS = 10_000
NUM_SLOW = 200
LIMIT_S = 150.0
MIB = 1 << 20
KEY = RunKey(hashlib.sha256(b"the run's secret").digest(), KeySource.VARIABLE)
TRAIN = """
import hashlib, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(3)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
noise, deadline = torch.Generator().manual_seed(dist.get_rank()), time.monotonic() + 400
for step in range(40):
    loss = model(torch.randn(8, 64, generator=noise)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    waits = torch.tensor(step == 20)
    while waits:  # all ranks talk to each other until the strangers are gone
        assert time.monotonic() < deadline
        waits = torch.tensor(float(not pathlib.Path(sys.argv[1]).exists()))
        print("is attacked", flush=True)
        dist.all_reduce(waits)
        time.sleep(0.05)
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("DIGEST", hashlib.sha256(weights).hexdigest(), flush=True)
"""


@contextlib.contextmanager
def raise_descriptor_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NUM_CONNECTIONS + 1000:
        pytest.skip(f"this machine permits {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run(folder: Path) -> Cluster:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN)
    return Cluster(
        script,
        str(folder / "enough"),
        run_dir=folder / "run",
        num_nodes=2,
        nproc_per_node=1,
        options=["--no-health-check", "--ft-node-heartbeat-timeout=30"],
        environment={"OUTLAST_RUN_KEY": KEY.as_variable()},
    )


def finish(cluster: Cluster, folder: Path) -> set[str]:
    """Let the run end; return the digests of its weights."""
    (folder / "enough").touch()
    assert cluster.wait(timeout_s=LIMIT_S) == [0, 0]
    digests = [re.findall(r"DIGEST (\w+)", agent.output()) for agent in cluster.agents]
    assert sum(map(len, digests)) == 2
    return {one for some in digests for one in some}


def query_until_refused(endpoint: Endpoint, run_id: str, key: RunKey) -> str:
    """Return the reason of the coordinator's refusal, which may come late behind thousands of connections."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            found, _ = probe(endpoint, run_id, key)
        except WrongRun as error:
            return str(error)
        assert found in (Occupant.SILENT, Occupant.UNREACHABLE)
        assert time.monotonic() < deadline


def test_foreign_connections_do_not_change_the_result(tmp_path: Path) -> None:
    """Ten thousand connections are opened and kept while two agents train: silent, slow, garbage, a recorded
    session, another run, key and version. No node is lost, no cycle ends, the coordinator keeps a bounded number of
    connections in bounded memory, and the weights are those of an undisturbed run."""
    with run(tmp_path / "quiet") as cluster:
        undisturbed = finish(cluster, tmp_path / "quiet")
    assert len(undisturbed) == 1
    with raise_descriptor_limit(), run(tmp_path / "attacked") as cluster, contextlib.ExitStack() as connections_stack:
        cluster.wait_for("is attacked", timeout_s=LIMIT_S)
        (endpoint,) = parse_endpoints(cluster.endpoint)
        identity = JobIdentity(run_id=cluster.run_id, key=KEY)
        host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
        process = psutil.Process(host.pid)
        memory, descriptors = process.memory_info().rss, process.num_fds()
        recorded = record(endpoint.port, identity)
        payloads = (b"", b"", b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(4096), b"\0" * 70_000, recorded)
        version_2 = b"OLw1\0\2" + bytes(200)
        slow: list[socket.socket] = []
        is_over = threading.Event()

        def send_slowly() -> None:
            while not is_over.wait(0.05):
                for stranger in slow:
                    with contextlib.suppress(OSError):
                        stranger.send(b"O")

        sender = threading.Thread(target=send_slowly)
        sender.start()
        try:
            for number in range(NUM_CONNECTIONS):
                stranger = connections_stack.enter_context(
                    socket.create_connection(("127.0.0.1", endpoint.port), timeout=LIMIT_S)
                )
                if len(slow) < NUM_SLOW and number % 7 == 0:
                    slow.append(stranger)
                    continue
                with contextlib.suppress(OSError):
                    stranger.setblocking(False)
                    stranger.send(payloads[number % len(payloads)] if number % 11 else version_2)
            assert "run key is another one" in query_until_refused(
                endpoint, cluster.run_id, RunKey.of_run_id("another")
            )
            assert "belongs to run" in query_until_refused(endpoint, "another", KEY)
            with pytest.raises(RendezvousError):
                ask(endpoint, m.AskStatus(), run_id="another", key=KEY, timeout_s=LIMIT_S)
            status = ask(endpoint, m.AskStatus(), run_id=cluster.run_id, key=KEY, timeout_s=LIMIT_S)
            assert isinstance(status, m.LiveStatus)
            assert (status.phase, sorted(node.name for node in status.nodes)) == ("running", ["node-0", "node-1"])
            assert process.num_fds() - descriptors < 1200
            assert process.memory_info().rss - memory < 64 * MIB
        finally:
            is_over.set()
            sender.join(LIMIT_S)
        attacked = finish(cluster, tmp_path / "attacked")
        kinds = [event.kind for event in cluster.events()]
    assert attacked == undisturbed
    assert EventKind.INCIDENT not in kinds
    assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0}
    lines = host.output().splitlines()
    assert 0 < sum("refused a connection" in line for line in lines) < 20, "strangers do not fill the log"
    assert os.path.getsize(host.log_path) < MIB


def test_node_joins_a_coordinator_that_was_stopped(tmp_path: Path) -> None:
    """A silent listener may be the run's first agent, stopped or busy: a new node waits for it."""
    script, go = tmp_path / "waits.py", tmp_path / "go"
    script.write_text(
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.05)\n"
    )
    limit_s = 150.0
    with Cluster(
        script, str(go), run_dir=tmp_path / "run", num_nodes=1, num_spares=1, num_started=1, nproc_per_node=1
    ) as cluster:
        cluster.wait_for("cycle 0: rank 0 of 1 runs here", limit_s)
        first = psutil.Process(cluster.agent(0).pid)
        first.suspend()
        try:
            spare, ports = cluster.add_node(), set()
            deadline_s = time.monotonic() + limit_s
            while len(ports) < 2:  # the first request got no response
                assert spare.running, spare.output()
                assert time.monotonic() < deadline_s
                connections = psutil.Process(spare.pid).net_connections()
                ports |= {
                    one.laddr.port for one in connections if one.raddr and str(one.raddr.port) in cluster.endpoint
                }
                time.sleep(0.01)
        finally:
            first.resume()
        cluster.wait_for("node node-1 waits", limit_s)
        go.touch()
        assert cluster.wait(limit_s) == [0, 0]
