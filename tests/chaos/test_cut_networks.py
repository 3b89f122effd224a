"""Network namespaces as hosts on one machine: they reach each other until they are cut off, and all are removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_outside_faults import COMMAND, CONFIG, SCRIPT, expected, tails

from outlast.chaos import Fault, FaultPlan
from outlast.chaos import netns as netns_module
from outlast.chaos.netns import NodeNetwork, clear_namespaces
from outlast.errors import ConfigError

pytestmark = pytest.mark.extended

_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()"
SERVE = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); [s.accept() for _ in range(9)]"


def leftovers(pid: int) -> list[str]:
    folder = Path("/var/run/netns")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [name for name in names if f"-{pid}-" in name] + [
        path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith((f"olb{pid}", f"olv{pid}x"))
    ]


@pytest.fixture
def can_make_hosts() -> None:
    """Skip where this machine does not allow network namespaces."""
    try:
        with NodeNetwork(1):
            pass
    except ConfigError as error:
        pytest.skip(str(error))


@_needs_root
@pytest.mark.process
@pytest.mark.usefixtures("can_make_hosts")
def test_a_cut_host_is_unreachable_until_it_is_joined() -> None:
    """A connection succeeds, fails while the host is cut off, and succeeds again; nothing remains afterwards."""
    with NodeNetwork(2) as network:
        command = network.command(1, [sys.executable, "-c", SERVE])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == "up\n"

                def reaches() -> bool:
                    words = [sys.executable, "-c", CALL, network.address(1), "7000"]
                    return (
                        subprocess.run(network.command(0, words), stderr=subprocess.DEVNULL, check=False).returncode
                        == 0
                    )

                assert reaches()
                network.cut(1)
                assert not reaches()
                network.join(1)
                assert reaches()
            finally:
                server.kill()
        assert leftovers(os.getpid())
    assert leftovers(os.getpid()) == []


@_needs_root
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("can_make_hosts")
def test_leftovers_of_a_killed_process_are_removed() -> None:
    """The next start removes the hosts of a process that was killed, and no others."""
    code = "import os, signal; from outlast.chaos.netns import NodeNetwork; n = NodeNetwork(2); n.__enter__(); "
    process = subprocess.Popen([sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGKILL)"])
    assert process.wait(60) == -signal.SIGKILL
    assert leftovers(process.pid)
    with NodeNetwork(1):
        assert leftovers(process.pid) == []
        clear_namespaces()
        assert leftovers(os.getpid()), "those of a living process stay"


@_needs_root
@pytest.mark.usefixtures("can_make_hosts")
def test_a_kernel_without_netem_rejects_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where packets can be neither delayed nor dropped, the plan is rejected in one line, and nothing remains."""
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"no netem .*leave them out"), NodeNetwork(1, needs_netem=True):
        pass
    assert leftovers(os.getpid()) == []


def test_missing_root_or_tools_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names what is missing."""
    monkeypatch.setattr(netns_module.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="--netns needs root"):
        NodeNetwork(1)
    monkeypatch.setattr(netns_module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns_module.shutil, "which", lambda _tool: None)
    with pytest.raises(ConfigError, match="install iproute2"):
        NodeNetwork(1)


@_needs_root
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("can_make_hosts")
def test_a_partition_replaces_a_node_and_keeps_the_result(tmp_path: Path) -> None:
    """A node that is cut off for longer than the heartbeat timeout is replaced, and the result is bit-identical."""
    plan = FaultPlan(seed=3, faults=[Fault(kind="partition", iteration=12, duration_s=8)])
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "outlast.toml").write_text(CONFIG.format(folder=tmp_path, async_save="true"))
    words = [f"--run-dir={tmp_path / 'run'}", "--ft-node-heartbeat-timeout=2", "--nproc-per-node=1"]
    words += [str(tmp_path / "script.py"), str(tmp_path), "0.4"]
    options = ["--nodes=2", "--spares=1", "--netns", "--json", str(tmp_path / "plan.toml"), "--"]
    with subprocess.Popen(
        [*COMMAND, *options, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        out, errors = run.communicate(timeout=400)
    assert run.returncode == 0, out + errors + tails(tmp_path)
    (row,) = json.loads(out)["faults"]
    assert row["fired"]
    assert row["detected_as"] == "node_lost"
    for rank in range(2):
        assert (tmp_path / f"result-{rank}").read_text() == expected(rank)
    assert leftovers(run.pid) == []
