"""The Prometheus endpoint of an agent: its metrics during a run, after a restart, and with slow or wrong clients."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outlast import clock
from outlast.errors import ConfigError
from outlast.incidents import Cause, Decision, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.launch import metrics_endpoint
from outlast.launch.metrics_endpoint import MetricsEndpoint
from outlast.launch.node_metrics import METRICS, AgentOutlook, NodeHistory
from outlast.launch.options import parse_options
from outlast.launch.protocol import LiveBudgets
from outlast.policy.recovery_policy import Limits, RecoveryState
from outlast.runtime.addresses import Endpoint
from outlast.runtime.injection import armed
from outlast.runtime.journal import Journal
from outlast.testing import Cluster
from outlast.testing.ranks import free_port

LONG_S = 100.0
LOCAL = Endpoint("127.0.0.1", 0)
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "outlast.json"
SCRIPT = """
import pathlib, sys, time
import torch, outlast
run = outlast.init(outlast.Config(checkpoint=outlast.CheckpointConfig(local_directory=sys.argv[1], save_interval=2)))
state = {"steps": torch.zeros(1)}
for iteration in run.steps(state, total=8):
    state["steps"] += 1
    if iteration == 5:
        print("waits", flush=True)
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.02)
"""
PLAIN = """
import os, pathlib, sys, time
go_on, cycle = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
started = [go_on.with_name(f"started-{cycle}-{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
started[int(os.environ["RANK"])].touch()
print("waits", flush=True)
while not (go_on.exists() and all(path.exists() for path in started)):
    time.sleep(0.02)
sys.exit(3)
"""
Series = dict[str, list[tuple[dict[str, str], float]]]


def scrape(url: str) -> Series:
    """Return the series of an endpoint, by metric."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: Series = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def one(metrics: Series, name: str, **labels: str) -> float | None:
    """Return the value of the only series with these labels."""
    values = [value for tags, value in metrics.get(f"outlast_{name}", []) if labels.items() <= tags.items()]
    assert len(values) <= 1, (name, values)
    return values[0] if values else None


def urls_of(cluster: Cluster) -> list[str]:
    """Return the URLs of the agents' endpoints, in the order of their nodes."""
    found = [re.search(r"http://\S+/metrics", agent.output()) for agent in cluster.agents]
    return [match[0] for match in found if match is not None]


def scrape_until(url: str, name: str, value: float, **labels: str) -> Series:
    """Scrape until a metric has reached a value."""
    deadline_s = clock.now_s() + LONG_S
    while True:
        metrics = scrape(url)
        if (one(metrics, name, **labels) or 0.0) >= value:
            return metrics
        assert clock.now_s() < deadline_s, metrics
        time.sleep(0.05)


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsEndpoint]:
    """An endpoint of a node ``a`` without an agent, which reads the journal continuously."""
    monkeypatch.setattr(metrics_endpoint, "LOOK_S", 0.02)
    shown = MetricsEndpoint(LOCAL, run_id="r", node="a", run_dir=tmp_path)
    yield shown
    shown.close()


# -- real agents -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.process
def test_each_agent_reports_its_ranks_and_the_restart(tmp_path: Path) -> None:
    """Each agent reports its own ranks, their progress and checkpoints; after a rank is killed the endpoints continue
    and count the restart on the coordinator's node and the cycle on both."""
    script, go_on = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    with Cluster(
        *(script, str(tmp_path / "saves"), str(go_on)),
        run_dir=tmp_path / "run",
        nproc_per_node=1,
        options=["--metrics-port=0"],
    ) as cluster:
        cluster.wait_for("waits", LONG_S)
        urls = urls_of(cluster)
        assert len(set(urls)) == 2
        scrapes = [scrape_until(url, "committed_iteration", 4, tier="local") for url in urls]
        ranks = [metrics["outlast_rank_iteration"][0][0]["rank"] for metrics in scrapes]
        assert sorted(ranks) == ["0", "1"]
        for metrics, rank, node in zip(scrapes, ranks, ("node-0", "node-1"), strict=True):
            assert metrics["outlast_rank_section_info"] == [
                ({"run_id": cluster.run_id, "node": node, "rank": rank, "section": "step"}, 1.0)
            ]
            assert one(metrics, "rank_state", rank=rank, state="running") == 1
            assert one(metrics, "rank_heartbeat_age_seconds", rank=rank) is not None
            assert [one(metrics, name) for name in ("cycle", "world_size", "num_nodes", "spares")] == [0, 2, 2, 0]
            assert one(metrics, "node_iteration") == 5
            assert one(metrics, "agent_state", state="running") == 1
            assert one(metrics, "cycles_started_total") == 1
            assert (one(metrics, "saves_total") or 0) >= 2
            assert 0 < (one(metrics, "job_goodput") or 0) < 1
            assert {name.removeprefix("outlast_") for name in metrics} <= set(METRICS)
        assert sorted(one(metrics, "agent_is_coordinator") or 0 for metrics in scrapes) == [0, 1]

        psutil.Process(cluster.worker_pid(1)).suspend()
        scrape_until(urls[ranks.index("1")], "rank_state", 1, rank="1", state="stopped")
        psutil.Process(cluster.worker_pid(1)).kill()
        later = [scrape_until(url, "cycles_started_total", 2) for url in urls]
        assert [one(metrics, "cycle") for metrics in later] == [1, 1]
        host = next(url for url, metrics in zip(urls, later, strict=True) if one(metrics, "agent_is_coordinator"))
        for url in urls:
            metrics = scrape_until(url, "restarts_total", 1, recovery_level="restart_workers")
            assert one(metrics, "restarts_total", recovery_level="replace_node") == 0
            assert one(metrics, "budget_left", budget="restarts") == 2
        metrics = scrape_until(host, "last_incident_info", 1, kind="worker_died", exit_code="-9")
        assert one(metrics, "last_incident_info", root_cause_rank="1", recovery_level="restart_workers") == 1
        num_died = sum(one(scrape(url), "incidents_total", kind="worker_died") or 0 for url in urls)
        assert num_died == 1
        go_on.touch()
        assert cluster.wait(LONG_S) == [0, 0]
    for url in urls:  # the endpoint closes with its agent
        with pytest.raises(OSError):
            urllib.request.urlopen(url, timeout=60)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_counters_survive_a_takeover(tmp_path: Path) -> None:
    """All counters start at 0, a stopped script without a session is reported, and no counter decreases when the
    coordinator's agent is killed and another one takes over. The endpoints stay open after the end until a scraper has
    the exit code and its cause."""
    script, go_on = tmp_path / "train.py", tmp_path / "go"
    script.write_text(PLAIN)
    options = ["--metrics-port=0", f"--metrics-linger={LONG_S:g}", "--max-restarts=2"]
    with Cluster(
        *(script, str(go_on)), run_dir=tmp_path / "run", num_nodes=2, num_spares=1, nproc_per_node=1, options=options
    ) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, LONG_S)
        cluster.wait_for("the node is a spare", LONG_S)
        urls = dict(zip((agent.name for agent in cluster.agents), urls_of(cluster), strict=True))
        for url in urls.values():
            metrics = scrape_until(url, "budget_left", 2, budget="restarts")
            metrics = scrape_until(url, "incidents_total", 0, kind="worker_died")
            counters = {f"outlast_{name}" for name, metric in METRICS.items() if metric.is_counter}
            assert counters <= set(metrics)
            assert {value for name in counters - {"outlast_cycles_started_total"} for _, value in metrics[name]} == {0}
            assert {tags["kind"] for tags, _ in metrics["outlast_incidents_total"]} == set(IncidentKind)
            assert one(metrics, "excluded_nodes") == one(metrics, "missing_nodes") == 0
            assert one(metrics, "timeout_seconds", timeout="node_heartbeat_timeout") == 5
        nodes = {
            event.data["ranks"][0]: event.node for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED
        }
        worker = psutil.Process(cluster.worker_pid(1))
        worker.suspend()
        scrape_until(urls[nodes[1]], "rank_state", 1, rank="1", state="stopped")
        worker.resume()
        scrape_until(urls[nodes[1]], "rank_state", 1, rank="1", state="starting")
        worker.kill()
        for url in urls.values():
            scrape_until(url, "restarts_total", 1, recovery_level="restart_workers")
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED and event.cycle == 1, LONG_S)
        host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
        host.kill()
        del urls[host.name]
        num_restarts = 2 if host.name in nodes.values() else 1  # the node that hosts the coordinator may be the spare
        scrapes: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
        deadline_s = clock.now_s() + LONG_S
        while any(not totals or sum(totals[-1].values()) < num_restarts for totals in scrapes.values()):
            assert clock.now_s() < deadline_s, scrapes
            for name, url in urls.items():
                shown = scrape(url)["outlast_restarts_total"]
                scrapes[name].append({tags["recovery_level"]: value for tags, value in shown})
        for totals in scrapes.values():
            for before, after in pairwise(totals):
                assert all(after[recovery_level] >= value for recovery_level, value in before.items()), totals
            assert totals[-1]["restart_workers"] >= 1
        while sum(one(scrape(url), "agent_is_coordinator") or 0 for url in urls.values()) != 1:
            assert clock.now_s() < deadline_s, scrapes
        go_on.touch()
        ends: dict[str, Series] = {}
        deadline_s = clock.now_s() + LONG_S
        while urls:
            assert clock.now_s() < deadline_s, ends
            for name, url in tuple(urls.items()):
                try:
                    ends[name] = scrape(url)
                except OSError:
                    del urls[name]
        assert [one(metrics, "job_exit_code", reason="failed") for metrics in ends.values()] == [1, 1]
        causes = [tags for metrics in ends.values() for tags, _ in metrics.get("outlast_last_incident_info", [])]
        exits = [value for metrics in ends.values() for _, value in metrics.get("outlast_rank_exit_code", [])]
        assert 3 in exits
        assert set(exits) <= {3, -signal.SIGTERM, -signal.SIGKILL}  # a node may end its rank before that exits
        codes = dict(zip((agent.name for agent in cluster.agents), cluster.wait(LONG_S), strict=True))
        assert codes.pop(host.name) == -9
        assert set(codes.values()) == {1}
        assert [(tags["kind"], tags["exit_code"], tags["recovery_level"]) for tags in causes] == [
            ("worker_failed", "3", "stop")
        ]


@pytest.mark.slow
@pytest.mark.process
def test_a_stopped_scraper_does_not_block_others(tmp_path: Path) -> None:
    """With a stopped scraper and silent connections another scraper gets its response, and the run finishes."""
    script, go_on = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    client = "import socket, sys, os, signal, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
    client += "s.sendall(b'GET /metrics HTTP/1.0\\r\\n\\r\\n'); print('asked', flush=True);"
    client += "os.kill(os.getpid(), signal.SIGSTOP)"
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(
                *(script, str(tmp_path / "saves"), str(go_on)),
                run_dir=tmp_path / "run",
                num_nodes=1,
                nproc_per_node=1,
                options=["--metrics-port=0"],
            )
        )
        cluster.wait_for("waits", LONG_S)
        (url,) = urls_of(cluster)
        port = int(url.rpartition(":")[2].partition("/")[0])
        stopped = subprocess.Popen([sys.executable, "-c", client, str(port)], stdout=subprocess.PIPE)
        stack.callback(stopped.wait, LONG_S)
        stack.callback(stopped.kill)
        assert stopped.stdout is not None
        stack.callback(stopped.stdout.close)
        assert stopped.stdout.readline() == b"asked\n"
        for _ in range(10):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert one(scrape(url), "node_iteration") == 5
        go_on.touch()
        assert cluster.wait(LONG_S) == [0]


@pytest.mark.process
def test_a_used_port_is_an_error(tmp_path: Path) -> None:
    """A second agent with the same port exits with 2 and one line with the port and the remedy, and leaves no run
    directory."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = (sys.executable, "-m", "outlast", "run", f"--metrics-port={port}", "--run-dir=run", str(script))
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("outlast: ")]
    assert line.startswith(
        f"outlast: nothing can listen at 127.0.0.1:{port} for --metrics-port (Address already in use)"
    )
    assert line.endswith("give each agent of a machine a different port, or 0 for a free one")
    assert "it ran" not in ended.stdout + ended.stderr
    assert not (tmp_path / "run").exists()


# -- the endpoint alone ------------------------------------------------------------------------------------------


def test_invalid_options_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid port, a name instead of an address, an address without a port and a missing package are errors."""
    script = tmp_path / "train.py"
    script.touch()
    for words, message in {
        ("--metrics-port=65536",): "--metrics-port=65536 is not a valid port; write a number from 1 to 65535, or 0",
        ("--metrics-port=-1",): "--metrics-port=-1 is not a valid port",
        ("--metrics-port=x",): "--metrics-port: 'x' does not fit; write a whole number",
        ("--metrics-port=0", "--metrics-address=here"): "--metrics-address=here is not an IP address",
        ("--metrics-address=127.0.0.1",): "--metrics-address has no effect without --metrics-port",
        ("--metrics-port=0", "--metrics-address="): "--metrics-address is empty",
        ("--metrics-linger=3",): "--metrics-linger has no effect without --metrics-port",
        ("--metrics-port=0", "--metrics-linger=-1"): "--metrics-linger=-1.0 must not be negative",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse_options([f"--run-dir={tmp_path / 'run'}", *words, str(script)])
    monkeypatch.setenv("OUTLAST_METRICS_PORT", "many")
    with pytest.raises(ConfigError, match="OUTLAST_METRICS_PORT=many is not a valid port"):
        parse_options([f"--run-dir={tmp_path / 'run'}", str(script)])
    monkeypatch.delenv("OUTLAST_METRICS_PORT")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"--metrics-port needs prometheus-client, .*: pip install 'outlast\[prom"):
        parse_options([f"--run-dir={tmp_path / 'run'}", "--metrics-port=0", str(script)])
    assert not (tmp_path / "run").exists()


def test_options_override_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment sets port and address where no option does; without both there is no endpoint."""
    script = tmp_path / "train.py"
    script.touch()

    def metrics(*words: str) -> Endpoint | None:
        return parse_options([f"--run-dir={tmp_path / 'run'}", *words, str(script)]).metrics

    assert metrics() is None
    assert metrics("--metrics-port=9465") == Endpoint("127.0.0.1", 9465)
    monkeypatch.setenv("OUTLAST_METRICS_PORT", "9000")
    monkeypatch.setenv("OUTLAST_METRICS_ADDRESS", "0.0.0.0")
    assert metrics() == Endpoint("0.0.0.0", 9000)
    assert metrics("--metrics-port=0", "--metrics-address=::1") == Endpoint("::1", 0)


def test_an_address_of_another_machine_is_rejected(tmp_path: Path) -> None:
    """One line contains the remedy, as for a used port."""
    with pytest.raises(ConfigError, match=r"nothing can listen at 192\.0\.2\.1:\d+ .*; give each agent"):
        MetricsEndpoint(Endpoint("192.0.2.1", free_port()), run_id="r", node="a", run_dir=tmp_path)


def test_connections_are_limited_in_number_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 17th connection is closed at once; silent ones are closed after their timeout, and then scrapers get a
    response."""
    monkeypatch.setattr(metrics_endpoint, "SCRAPE_S", 1.0)
    shown = MetricsEndpoint(LOCAL, run_id="r", node="a", run_dir=tmp_path)
    try:
        where = "127.0.0.1", int(shown.url.rpartition(":")[2].partition("/")[0])
        with ExitStack() as stack:
            silent_connections = [stack.enter_context(socket.create_connection(where)) for _ in range(17)]
            for connection in silent_connections:
                connection.settimeout(LONG_S)
                assert connection.recv(1) == b""
        assert one(scrape(shown.url), "agent_state", state="starting") == 1
    finally:
        shown.close()
        shown.close()


def test_metrics_follow_the_journal(tmp_path: Path, endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves by tier with their stalls, failed saves, incidents by kind, the newest incident with its cause, scores and
    goodput follow the events of this node and job in the journal, and no others."""
    agent, coordinator, rank = (
        Journal(tmp_path, run_id="r", job="job-1", node="a", proc=proc) for proc in ("agent", "coordinator", "rank-0")
    )
    cause = Cause(type="torch.OutOfMemoryError", text="full")
    incident = Incident(
        kind=IncidentKind.WORKER_FAILED, node="a", rank=0, exit_code=1, evidence={"cause": cause, "tier": "x"}
    )
    failed = Incident(kind=IncidentKind.SAVE_FAILED, node="a", rank=0, evidence={"tier": "local"})
    decision = Decision(recovery_level=RecoveryLevel.RESTART_WORKERS, reason="again")
    agent.write(EventKind.JOB_STARTED, start_up_s=15.0)
    agent.write(EventKind.CYCLE_STARTED, cycle=0, ranks=[0])
    agent.write(EventKind.INCIDENT, incident=incident)
    coordinator.write(EventKind.DECISION, cycle=0, incident=incident, verdict=decision)
    coordinator.write(EventKind.DECISION, cycle=0, verdict=decision)  # no incident: a restart without one
    now_ns = clock.wall_ns()
    for begin, end_ns in ((0, now_ns - 5_000_000_000), (5, now_ns)):  # half of the first ten steps are lost
        for iteration in (begin, begin + 1, 10):
            at_ns = end_ns - (10 - iteration) * 500_000_000
            monkeypatch.setattr(clock, "wall_ns", lambda at_ns=at_ns: at_ns)
            kind = EventKind.STEPS_STARTED if iteration == begin else EventKind.PROGRESS
            rank.write(kind, rank=0, iteration=iteration)
    monkeypatch.undo()
    monkeypatch.setattr(metrics_endpoint, "LOOK_S", 0.02)
    rank.write(EventKind.SAVE_SCHEDULED, rank=0, iteration=10, stall_s=0.25)
    rank.write(EventKind.SAVE_COMMITTED, rank=0, iteration=10, tiers=["memory", "local"])
    rank.write(EventKind.INCIDENT, rank=0, iteration=11, incident=failed)
    rank.write(EventKind.STRAGGLER_REPORT, rank=0, metrics={"gpu_relative_perf/min": 0.5})
    for other in ({"job": "job-1", "node": "b"}, {"job": "job-0", "node": "a"}):
        journal = Journal(tmp_path, run_id="r", proc="rank-0", **other)
        journal.write(EventKind.SAVE_SCHEDULED, rank=0, iteration=90, stall_s=9.0)
        journal.close()
    for journal in (agent, coordinator, rank):
        journal.close()
    history = NodeHistory(tmp_path, "a")
    history.read_on("job-1", [0])
    found = {(name, *labels.values()): value for name, labels, value in history.show()}
    assert found["incidents_total", "worker_failed"] == found["incidents_total", "save_failed"] == 1
    assert found["incidents_total", "worker_died"] == 0
    assert [found["save_failures_total", tier] for tier in ("memory", "local", "global")] == [0, 1, 0]
    last = ("worker_failed", "a", "0", "1", "torch.OutOfMemoryError", "restart_workers")
    assert found["last_incident_info", *last] == 1
    assert found["committed_iteration", "local"] == 10
    assert (found["saves_total",], found["save_stall_seconds",], found["save_stall_seconds_total",]) == (1, 0.25, 0.25)
    assert found["straggler_score", "relative", "min"] == 0.5
    # Ten steps count, although fifteen were done; so does the agent's own start.
    assert found["job_goodput",] == pytest.approx(5.0 / 15.0, rel=0.1)

    endpoint.show(lambda: AgentOutlook(job="job-1", is_host=True))
    metrics = scrape_until(endpoint.url, "incidents_total", 1, kind="worker_failed")
    assert one(metrics, "agent_is_coordinator") == 1
    history.read_on("job-2", [])  # the next job begins at 0
    assert {value for name, _, value in history.show() if name == "incidents_total"} == {0}


def test_budgets_and_limits_are_reported(endpoint: MetricsEndpoint) -> None:
    """Restarts by recovery level, budgets, excluded and missing nodes, timeouts and the exit code are those of the
    agent; unknown values and unlimited budgets are not reported."""
    assert not any("restarts" in name or "budget" in name for name in scrape(endpoint.url))
    recovery_state = RecoveryState(
        restarts_by_level={"REPLACE_NODE": 4}, restarts_without_progress=1, quarantined=("n3", "n1"), held_back=("n1",)
    )
    limits = Limits(max_restarts=3, max_no_progress_cycles=2)
    endpoint.show(
        lambda: AgentOutlook(
            num_missing=2,
            recovery_state=recovery_state,
            budgets=LiveBudgets.of(recovery_state, limits),
            timeouts={"rank_heartbeat_timeout": 300.0, "exit_timeout": None},
            exit_code=93,
        )
    )
    metrics = scrape(endpoint.url)
    level = ("restart_in_process", "restart_workers", "replace_node")
    assert [one(metrics, "restarts_total", recovery_level=recovery_level) for recovery_level in level] == [0, 0, 4]
    budgets = {tags["budget"]: value for tags, value in metrics["outlast_budget_left"]}
    assert budgets == {"restarts": 2, "no_progress_cycles": 2}
    assert (one(metrics, "missing_nodes"), one(metrics, "excluded_nodes")) == (2, 2)
    assert [tags["excluded_node"] for tags, _ in metrics["outlast_excluded_node_info"]] == ["n1", "n3"]
    assert [tags["timeout"] for tags, _ in metrics["outlast_timeout_seconds"]] == ["rank_heartbeat_timeout"]
    assert one(metrics, "job_exit_code", reason="no_progress") == 93


@pytest.mark.parametrize(("code", "reason"), [(0, "finished"), (143, "sigterm"), (75, "preempted"), (42, "other")])
def test_an_exit_code_has_a_reason(endpoint: MetricsEndpoint, code: int, reason: str) -> None:
    """The exit code of a job is reported with its reason."""
    endpoint.show(lambda: AgentOutlook(exit_code=code))
    assert one(scrape(endpoint.url), "job_exit_code", reason=reason) == code


def test_the_endpoint_waits_for_a_last_scrape(endpoint: MetricsEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    """The wait for a scrape ends with the first one after the job's last events were read, or with a warning."""
    endpoint.await_scrape(0.0)
    endpoint.await_scrape(0.05)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "no scrape within 0.05 s after the job's end: its exit code is in no metric"
    ]
    endpoint.show(lambda: AgentOutlook(job="j", exit_code=0))
    waits = threading.Thread(target=endpoint.await_scrape, args=(LONG_S,))
    waits.start()
    deadline_s = clock.now_s() + LONG_S
    while waits.is_alive():
        assert clock.now_s() < deadline_s
        assert one(scrape(endpoint.url), "job_exit_code") == 0
        waits.join(0.05)


@pytest.mark.process
def test_a_hung_disk_does_not_block_scrapes(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    """While the journal cannot be read, all other metrics are reported, and the endpoint closes."""
    answers, hangs = threading.Event(), threading.Event()

    def hang(path: Path) -> None:
        hangs.set()
        answers.wait()

    with armed("journal.read", hang):
        endpoint.show(lambda: AgentOutlook(job="j", state="running"))
        try:
            assert hangs.wait(60.0)
            for _ in range(3):
                metrics = scrape(endpoint.url)
                assert one(metrics, "agent_state", state="running") == 1
                assert one(metrics, "journal_age_seconds") is None
            endpoint.close()
        finally:
            answers.set()


# -- the dashboard -----------------------------------------------------------------------------------------------


def test_the_dashboard_queries_existing_metrics() -> None:
    """Each query of docs/grafana/outlast.json uses metrics and labels of the endpoint, and together they use all
    metrics; panels have a unique place, title and number."""
    board = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= set(board)
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    queries += [one["expr"] for one in board["annotations"]["list"]]
    named: set[str] = set()
    for query in queries:
        found = re.findall(r"outlast_(\w+)(?:\{([^}]*)\})?", query)
        assert found, query
        for name, selectors in found:
            assert name in METRICS, query
            known = {"run_id", "node", *METRICS[name].labels}
            assert set(re.findall(r"(\w+)\s*[=!]~?", selectors)) <= known, query
        groups = re.findall(r"by \(([^)]*)\)", query)
        labels = {label.strip() for group in groups for label in group.split(",")}
        assert labels <= {label for name, _ in found for label in METRICS[name].labels}, query
        assert query.count("(") == query.count(")")
        named |= {name for name, _ in found}
    assert named == set(METRICS)
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        tags = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert panel["title"]
        assert not cells & tags, f"{panel['title']} lies on another panel"
        assert all(0 <= x < 24 for x, _ in tags)
        cells |= tags
    variables = {one["name"] for one in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", " ".join(queries))) <= variables


@pytest.mark.process
def test_the_endpoint_imports_neither_torch_nor_prometheus() -> None:
    """The module can be imported without torch and the Prometheus client."""
    code = "import sys, outlast.launch.metrics_endpoint; print({'torch', 'prometheus_client'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert loaded.stdout.strip() == "set()"
