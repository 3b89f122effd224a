"""Metrics reach other loggers, verified with their own readers, and no logger delays a step."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import python_blocks, run_python

from outlast.errors import ConfigError
from outlast.incidents import IncidentKind
from outlast.integrations import metrics
from outlast.integrations.metrics import MetricsRun
from outlast.testing import Cluster
from outlast.testing.ranks import free_port

WITHIN_S = 120.0
RUN = MetricsRun(run_id="gpt", iteration=0)
METRICS = {
    "outlast/step_time_s": 0.25,
    "outlast/goodput": 0.5,
    "outlast/incidents/hang": 2.0,
    "outlast/gpu_relative_perf/min": 0.75,
    "outlast/gpu_relative_perf/max": 1.0,
}


class Listed(metrics.BackgroundSink):
    """Records its calls; they wait for a gate, and the calls in ``refused`` raise."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[Any] = []
        self.failing: set[Any] = set()

    def _do(self, what: Any) -> None:
        self.gate.wait(WITHIN_S)
        if what in self.failing:
            raise OSError("no network,\nreally")
        self.calls.append(what)

    def _open(self, run: MetricsRun) -> None:
        self._do(f"open {run.run_id} {run.iteration}")

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._do(iteration)

    def _close(self) -> None:
        self._do("close")


def write(sink: Any, *iterations: int, run: MetricsRun = RUN) -> None:
    """Write the same metrics for some iterations of a run, and end the run."""
    sink.begin_run(run)
    for iteration in iterations:
        sink(METRICS, iteration)
    sink.end_run(WITHIN_S)


class SignallingGauges(metrics.PrometheusSink):
    """Signals when gauges are exported."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.exported, self.may_close = threading.Event(), threading.Event()
        self.may_close.set()

    def _flush(self) -> None:
        super()._flush()
        self.exported.set()

    def _close(self) -> None:
        self.may_close.wait(WITHIN_S)
        super()._close()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag, read with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


# -- no delay of steps ---------------------------------------------------------------------------------------------


def test_hanging_sink_does_not_delay_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sink that hangs in a write delays neither the loop nor the end; dropped records are counted and reported
    once, and other sinks get all records."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading, writing = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY)
    try:
        hanging = metrics.CallableSink(lambda metrics, iteration: os.write(writing, b"x" * (1 << 20)), max_queued=8)
        recorder = Listed()
        sinks = metrics.SeveralSinks(hanging, recorder)
        sinks.begin_run(RUN)
        for iteration in range(1, 101):
            sinks(METRICS, iteration)
        assert hanging.num_dropped >= 100 - 8 - 1
        sinks.end_run(0.2)
        assert recorder.calls == ["open gpt 0", *range(1, 101), "close"]
        messages = [record.getMessage() for record in caplog.records if record.name == metrics.log.name]
        assert [text for text in messages if "cannot keep up" in text] == [
            "CallableSink cannot keep up: metrics are dropped, training continues"
        ]
        assert any(text.startswith("CallableSink did not end within") for text in messages)
        assert f"CallableSink: {hanging.num_dropped} records of metrics dropped" in "\n".join(messages)
    finally:
        os.close(reading)  # the write fails, which ends the thread
        os.close(writing)


class RecordingMetrics(Listed):
    """Records metrics instead of iterations."""

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._do(tuple(metrics.items()))


def test_a_sink_writes_the_values_of_its_call() -> None:
    """A tensor that changes in place before it is written is written with its value at the call."""
    sink, loss = RecordingMetrics(), torch.tensor(3.0)
    sink.begin_run(RUN)
    sink.gate.clear()
    metrics: Any = {"loss": loss}
    sink(metrics, 1)
    loss += 2
    sink.gate.set()
    sink.end_run(WITHIN_S)
    assert sink.calls[1:-1] == [(("loss", 3.0),)]


@pytest.mark.slow
@pytest.mark.process
def test_hanging_sink_does_not_delay_the_end_of_a_session(tmp_path: Path) -> None:
    """A session trains to its end with a sink whose first write hangs."""
    script = tmp_path / "train.py"
    script.write_text(
        "import threading, torch, outlast\n"
        "from outlast.integrations import metrics\n"
        "sink = metrics.CallableSink(lambda figures, iteration: threading.Event().wait(), max_queued=4)\n"
        "with outlast.init(outlast.Config(), log_metrics=sink) as run:\n"
        "    print([*run.steps({'w': torch.zeros(1)}, total=50)][-1])\n"
    )
    completed = run_python(script)
    assert completed.stdout == "49\n"
    assert "CallableSink did not end within 5 s; 4 records of metrics not written" in completed.stderr
    assert "CallableSink: 46 records of metrics dropped" in completed.stderr


@pytest.mark.parametrize(
    ("failing", "retry_s", "calls"),
    [
        ({2, 3}, 60.0, ["open gpt 0", 1, 4, 5, "close"]),
        ({"open gpt 0"}, 60.0, []),
        ({3}, 0.0, ["open gpt 0", 1, 2, "close", "open gpt 3", 4, 5, "close"]),
    ],
    ids=["write", "open", "write, then reopened"],
)
def test_failing_sink_continues(
    failing: set[Any], retry_s: float, calls: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """Lost records are counted and reported once; a sink that keeps failing is reopened."""
    monkeypatch.setattr(metrics, "RETRY_S", retry_s)
    sink = Listed()
    sink.failing = failing
    write(sink, *range(1, 6))
    num_lost = 5 - sum(isinstance(one, int) for one in calls)
    assert (sink.calls, sink.num_failed, sink.num_dropped) == (calls, num_lost, 0)
    messages = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Listed")]
    assert messages[0] == "Listed failed (OSError: no network, really); training continues"
    assert messages[1].startswith("Listed: 0 records of metrics dropped because the sink could not keep up, ")
    assert len(messages) == 2


def test_new_run_waits_for_the_end_of_the_previous_run() -> None:
    """After an in-process restart the sink is reopened once all records of the old run are written and closed."""
    sink = Listed()
    sink.gate.clear()
    sink.begin_run(RUN)
    sink(METRICS, 1)
    sink.end_run(0)
    sink.begin_run(MetricsRun(run_id="gpt", iteration=7))
    sink(METRICS, 8)
    sink.gate.set()
    sink.end_run(WITHIN_S)
    assert sink.calls == ["open gpt 0", 1, "close", "open gpt 7", 8, "close"]


@pytest.mark.parametrize(("every_rank", "rank", "writes"), [(False, 0, True), (False, 1, False), (True, 1, True)])
def test_only_rank_0_writes_by_default(every_rank: bool, rank: int, writes: bool) -> None:
    """Rank 0 alone writes, or all ranks with every_rank."""
    sink = Listed(every_rank=every_rank)
    write(sink, 1, run=MetricsRun(run_id="gpt", iteration=0, global_rank=rank, world_size=2))
    assert bool(sink.calls) == writes


def test_sink_in_a_callable_uses_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that a script's own function calls gets rank and run from the environment."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "gpt")
    monkeypatch.setenv("RANK", "0")
    sink = Listed()
    sink(METRICS, 11)
    sink.end_run(WITHIN_S)
    assert sink.calls == ["open gpt 10", 11, "close"]


def test_sink_in_a_callable_is_flushed_at_exit(tmp_path: Path) -> None:
    """A sink that a script's own function calls is written and closed at the end of the process, while threads still
    work."""
    script = tmp_path / "train.py"
    script.write_text(
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from outlast.integrations import metrics\n"
        "gate = threading.Event()\n"
        "class Gated(metrics.BackgroundSink):\n"
        "    def _open(self, run): gate.wait()\n"
        "    def _write(self, figures, iteration): pool.submit(print, 'wrote', iteration, flush=True).result()\n"
        "    def _close(self): print('close', flush=True)\n"
        "    def end_run(self, *args): gate.set(); super().end_run(*args)\n"
        "pool = ThreadPoolExecutor(1)\n"
        "sink = Gated()\n"
        "for iteration in (1, 2):\n"
        "    (lambda figures, iteration: sink(figures, iteration))({'a': 1.0}, iteration)\n"
    )
    assert run_python(script).stdout == "wrote 1\nwrote 2\nclose\n"


def test_sys_exit_in_a_sink_loses_one_record_only() -> None:
    """A function that calls sys.exit() loses that record only."""
    seen = []

    def function(metrics: dict[str, float], iteration: int) -> None:
        if iteration == 1:
            sys.exit(3)
        seen.append(iteration)

    sink = metrics.CallableSink(function)
    write(sink, *(1, 2, 3))
    assert (seen, sink.num_failed) == ([2, 3], 1)


# -- the loggers ---------------------------------------------------------------------------------------------------


def test_tensorboard_shows_repeated_iterations_once(tmp_path: Path) -> None:
    """After a restart from iteration 2 TensorBoard shows iterations 3 and 4 once, with the new values."""
    for begin, end, value in ((0, 4, 1.0), (2, 6, 2.0)):
        sink = metrics.TensorBoardSink(tmp_path)
        sink.begin_run(MetricsRun(run_id="gpt", iteration=begin))
        for iteration in range(begin + 1, end + 1):
            sink({**METRICS, "outlast/step_time_s": value}, iteration)
        sink.end_run(WITHIN_S)
    found = scalars(tmp_path)
    assert set(found) == set(METRICS)
    assert found["outlast/step_time_s"] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]


def test_tensorboard_writer_of_torch_is_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorboardX the writer of torch is used, with a folder for each rank."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    sink = metrics.TensorBoardSink(tmp_path, every_rank=True)
    write(sink, 1, run=MetricsRun(run_id="gpt", iteration=0, global_rank=3, world_size=4))
    assert scalars(tmp_path / "rank-3")["outlast/goodput"] == [(1, 0.5)]


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WITHIN_S) as response:
        text: str = response.read().decode()
    return text


SERIES = {
    'outlast_step_time_seconds{rank="1",run_id="gpt"} 0.25',
    'outlast_goodput{rank="1",run_id="gpt"} 0.5',
    'outlast_incidents{kind="hang",rank="1",run_id="gpt"} 2.0',
    'outlast_gpu_relative_perf{rank="1",run_id="gpt",stat="min"} 0.75',
    'outlast_gpu_relative_perf{rank="1",run_id="gpt",stat="max"} 1.0',
    'outlast_iteration{rank="1",run_id="gpt"} 7.0',
    *(f'outlast_incidents{{kind="{kind}",rank="1",run_id="gpt"}} 0.0' for kind in IncidentKind),
}


def test_prometheus_exports_by_endpoint_and_file(tmp_path: Path) -> None:
    """The endpoint (on 127.0.0.1) and the file export each metric with unit and labels, and each kind of incident
    from the start; after the end the port is closed."""
    sink = SignallingGauges(port=0, textfile=tmp_path / "outlast.prom", every_rank=True)
    sink.begin_run(MetricsRun(run_id="gpt", iteration=6, global_rank=1, local_rank=1, world_size=2))
    assert sink.url is None
    sink(METRICS, 7)
    assert sink.exported.wait(WITHIN_S)
    url = sink.url
    assert url is not None
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
    exported = {line for line in read(url).splitlines() if not line.startswith("#")}
    assert exported == SERIES
    sink.end_run(WITHIN_S)
    with pytest.raises(urllib.error.URLError):
        read(url)
    from prometheus_client.parser import text_string_to_metric_families

    text = (tmp_path / "outlast-rank-1.prom").read_text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {(s.name, s.labels.get("stat") or s.labels.get("kind"), s.value) for s in samples} >= {
        ("outlast_gpu_relative_perf", "min", 0.75),
        ("outlast_incidents", "hang", 2.0),
    }
    assert len(samples) == len(SERIES)


def test_prometheus_supports_a_second_run_in_a_registry() -> None:
    """A second run does not register a gauge twice."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    sink = metrics.PrometheusSink(registry=registry)
    for _ in range(2):
        write(sink, 1)
    assert sink.num_failed == 0


def test_prometheus_waits_for_a_closing_sinks_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second session's sink waits for the closing of the first one's, then listens on the same port."""
    port = free_port()
    first, second = SignallingGauges(port=port), SignallingGauges(port=port)
    monkeypatch.setattr(metrics, "CLOSING_S", WITHIN_S)
    first.may_close.clear()
    first.begin_run(RUN)
    first(METRICS, 1)
    assert first.exported.wait(WITHIN_S)
    first.end_run(0)
    second.begin_run(RUN)
    second(METRICS, 2)
    assert not second.exported.wait(0.2)
    first.may_close.set()
    assert second.exported.wait(WITHIN_S)
    assert 'outlast_iteration{run_id="gpt"} 2.0' in read(f"http://127.0.0.1:{port}/metrics")
    second.end_run(WITHIN_S)
    assert (first.num_failed, second.num_failed) == (0, 0)


def test_prometheus_file_is_updated_without_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that arrive shortly after a write are in the file later, without a further step."""
    monkeypatch.setattr(metrics, "_TEXTFILE_S", 1.0)
    path = tmp_path / "outlast.prom"
    sink = SignallingGauges(textfile=path)
    sink.begin_run(RUN)
    for iteration in (1, 2):
        sink(METRICS, iteration)
        until_s = time.monotonic() + WITHIN_S
        while not path.exists() or f'outlast_iteration{{run_id="gpt"}} {iteration}.0' not in path.read_text():
            assert time.monotonic() < until_s
            time.sleep(0.02)
    sink.end_run(WITHIN_S)


def test_prometheus_gauge_failure_keeps_other_gauges() -> None:
    """A gauge that cannot be registered does not affect the others."""
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    Gauge("outlast_step_time_seconds", "another's", registry=registry)
    sink = SignallingGauges(registry=registry)
    sink.begin_run(RUN)
    sink(METRICS, 7)
    assert sink.exported.wait(WITHIN_S)
    assert registry.get_sample_value("outlast_iteration", {"run_id": "gpt"}) == 7
    assert registry.get_sample_value("outlast_goodput", {"run_id": "gpt"}) == 0.5
    sink.end_run(WITHIN_S)
    assert sink.num_failed == 1


def test_prometheus_rejects_ports_above_the_range() -> None:
    """A port without room for the local rank is rejected by name; the other sinks are started."""
    sink, recorder = metrics.PrometheusSink(port=65535, every_rank=True), Listed(every_rank=True)
    several = metrics.SeveralSinks(sink, recorder)
    with pytest.raises(ConfigError, match="port=65535 leaves no port to local rank 1, which would have 65536"):
        several.begin_run(MetricsRun(run_id="gpt", iteration=0, global_rank=1, local_rank=1, world_size=2))
    several(METRICS, 1)
    several.end_run(WITHIN_S)
    assert recorder.calls == ["open gpt 0", 1, "close"]
    write(sink)


class Wandb:
    """The part of wandb that a sink calls; a finished run accepts nothing."""

    class Run:
        def __init__(self, owner: Wandb, given: dict[str, Any]) -> None:
            self.owner, self.given, self.logged, self.is_finished = owner, given, list[int](), False

        def define_metric(self, name: str, **options: Any) -> None:
            assert not self.is_finished

        def log(self, metrics: dict[str, float]) -> None:
            assert not self.is_finished, "the run is finished"
            self.logged.append(int(metrics["outlast/iteration"]))

        def finish(self) -> None:
            self.owner.gate.wait(WITHIN_S)
            self.is_finished, self.owner.run = True, None

    def __init__(self) -> None:
        self.run: Wandb.Run | None = None
        self.gate = threading.Event()
        self.runs: list[Wandb.Run] = []

    def init(self, **given: Any) -> Run:
        self.run = self.Run(self, {name: value for name, value in given.items() if value is not None})
        self.runs.append(self.run)
        return self.run


def test_wandb_waits_for_a_run_that_is_finishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second session's sink waits until the first one's run is finished, and logs to a separate run."""
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(metrics, "CLOSING_S", WITHIN_S)
    first, second = metrics.WandbSink(), metrics.WandbSink()
    first.begin_run(RUN)
    first(METRICS, 1)
    first.end_run(0)
    second.begin_run(MetricsRun(run_id="gpt", iteration=1))
    second(METRICS, 2)
    wandb.gate.set()
    second.end_run(WITHIN_S)
    assert [run.logged for run in wandb.runs] == [[1], [2]]
    assert [run.given for run in wandb.runs] == [{"id": "gpt", "name": "gpt", "resume": "allow"}] * 2


@pytest.mark.parametrize("run_id", ["default", "none"])
def test_wandb_without_a_run_id_starts_a_new_run(
    run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a run id W&B draws one, which one line reports; a script's own id is used."""
    wandb = Wandb()
    wandb.gate.set()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for options in ({}, {"every_rank": True}, {"settings": {"id": "mine", "resume": "allow"}}):
        sink = metrics.WandbSink(**options)  # type: ignore[arg-type]
        for _ in range(2):
            write(sink, 1, run=MetricsRun(run_id=run_id, iteration=0))
        assert sink.num_failed == 0
    given = [run.given for run in wandb.runs]
    assert given == [{}, {}, {"name": "rank-0"}, {"name": "rank-0"}, *[{"id": "mine", "resume": "allow"}] * 2]
    messages = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    text = "WandbSink: the run has no id, so that a restart begins another one there; give it an id (--rdzv-id)"
    assert messages == [text] * 2


def test_mlflow_without_a_run_id_starts_a_new_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a run id no MLflow run is searched, and none gets the tag."""
    calls: list[Any] = []

    class Client:
        def __init__(self, tracking_uri: str | None) -> None: ...

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                calls.append((name, keywords))
                info = types.SimpleNamespace(run_id="drawn")
                return [] if name == "search_runs" else types.SimpleNamespace(experiment_id="0", info=info)

            return call

    now = types.SimpleNamespace(get_current_time_millis=lambda: 0)
    fake = types.SimpleNamespace(
        MlflowClient=Client,
        utils=types.SimpleNamespace(time=now),
        entities=types.SimpleNamespace(Metric=lambda *values: values),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for run_id in ("none", "gpt"):
        sink = metrics.MLflowSink()
        write(sink, 1, run=MetricsRun(run_id=run_id, iteration=0))
        assert sink.num_failed == 0
    created = [keywords for name, keywords in calls if name == "create_run"]
    assert created == [{"tags": {}, "run_name": None}, {"tags": {"outlast.run_id": "gpt"}, "run_name": "gpt"}]
    assert [name for name, _ in calls].count("search_runs") == 1
    assert "MLflowSink: the run has no id" in caplog.text


def test_opentelemetry_records_gauges() -> None:
    """Metrics are gauges with units; kinds and statistics are attributes."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sink = metrics.OpenTelemetrySink(MeterProvider([reader]))
    write(sink, 7)
    assert sink.num_failed == 0
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {
        (metric.name, metric.unit, point.attributes.get("kind") or point.attributes.get("stat"), point.value)
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert found == {
        ("outlast.step_time", "s", None, 0.25),
        ("outlast.goodput", "1", None, 0.5),
        ("outlast.incidents", "1", "hang", 2.0),
        ("outlast.gpu_relative_perf", "1", "min", 0.75),
        ("outlast.gpu_relative_perf", "1", "max", 1.0),
        ("outlast.iteration", "1", None, 7.0),
    }


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (metrics.PrometheusSink, "shows its gauges nowhere; give it port, textfile or registry"),
        (lambda: metrics.PrometheusSink(port=70000), "port=70000 is not a valid port"),
        (lambda: metrics.PrometheusSink(textfile="a.txt"), r"textfile='a.txt' must end with .prom"),
        (lambda: metrics.PrometheusSink(port=0, address="here"), "address='here' is not an IP address"),
        (lambda: metrics.TensorBoardSink("a", max_queued=0), "max_queued=0 must be at least 1"),
    ],
)
def test_invalid_values_are_rejected(make: Any, remedy: str) -> None:
    """Invalid values are rejected when the sink is created."""
    with pytest.raises(ConfigError, match=remedy):
        make()


@pytest.mark.parametrize(
    ("missing", "make", "extra"),
    [
        (
            ("tensorboardX", "tensorboard", "torch.utils.tensorboard"),
            lambda: metrics.TensorBoardSink("a"),
            "tensorboard",
        ),
        (("wandb",), metrics.WandbSink, "wandb"),
        (("mlflow",), metrics.MLflowSink, "mlflow"),
        (("prometheus_client",), lambda: metrics.PrometheusSink(port=0), "prometheus"),
        (("opentelemetry.metrics",), metrics.OpenTelemetrySink, "opentelemetry"),
    ],
)
def test_missing_package_is_reported_with_its_extra(
    missing: tuple[str, ...], make: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is reported when the sink is created, with the extra to install."""
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"^\w+Sink needs \S+, which is not installed: pip install 'outlast\[{extra}\]'$"
    ):
        make()


# -- in a run ------------------------------------------------------------------------------------------------------

TRAIN = """
import os, signal, sys, torch, outlast
from outlast.integrations import metrics

folder = sys.argv[1]
sink = metrics.TensorBoardSink(folder + "/tb")
with outlast.init(folder + "/outlast.toml", log_metrics=metrics.SeveralSinks(sink)) as run:
    torch.manual_seed(1)
    weight = torch.zeros(1)
    for iteration in run.steps({"weight": weight}, total=20):
        weight += 1
        if iteration == 13 and os.environ["OUTLAST_CYCLE"] == "0" and run.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
print("weight", weight.item(), flush=True)
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_killed_run_is_continuous_in_tensorboard(tmp_path: Path) -> None:
    """After a SIGKILL of a rank TensorBoard has each iteration once, the restart, its cause, and the goodput."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (tmp_path / "outlast.toml").write_text(f'[checkpoint]\ndirectory = "{tmp_path}/ckpt"\nsave_interval = 5\n')
    with Cluster(script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2) as cluster:
        assert cluster.wait(WITHIN_S) == [0], cluster.tails()
        assert "weight 20.0" in cluster.agents[0].output()
    found = scalars(tmp_path / "tb")
    assert [step for step, _ in found["outlast/step_time_s"]] == [*range(1, 21)]
    restarts = [value for _, value in found["outlast/restart_count"]]
    assert restarts == sorted(restarts)
    assert restarts[-1] == 1
    assert found["outlast/incidents/worker_died"][-1] == (20, 1.0)
    shares = [value for _, value in found["outlast/goodput"]]
    assert all(0 < value <= 1 for value in shares)
    steps_s = sum(value for _, value in found["outlast/step_time_s"])
    assert shares[-1] < 1
    assert steps_s > 0


def test_goodput_is_a_share_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored goodput stays between 0 and 1 if the wall clock was set back."""
    from outlast.runtime.journal import Journal
    from outlast.session.metrics import Goodput

    now = {"wall": 1_000_000_000_000, "mono": 0}
    monkeypatch.setattr("outlast.clock.wall_ns", lambda: now["wall"])
    monkeypatch.setattr("outlast.clock.now_ns", lambda: now["mono"])
    first = Goodput(Journal(None, run_id="a", job="a", node="a", proc="a"), None)
    first.begin(0)
    for name in now:
        now[name] += int(6e9)
    first.note_step(now["mono"], 1)
    assert first.share == pytest.approx(1.0)
    now["wall"] -= int(1e12)
    second = Goodput(Journal(None, run_id="a", job="a", node="a", proc="a"), None)
    second.load_state_dict(first.state_dict())
    assert 0 <= second.share <= 1


@pytest.mark.parametrize("number", range(len(python_blocks("metrics.md"))))
def test_documented_code_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block of the page works unchanged."""
    monkeypatch.chdir(tmp_path)
    block = python_blocks("metrics.md")[number]
    namespace: dict[str, Any] = {}
    if "port=9464" in block:
        block = block.replace("9464", "0")
    exec(compile(block, "metrics.md", "exec"), namespace)
    if "run" in namespace:
        namespace["run"].close()
    sink = namespace.get("sink") or namespace["LinesSink"](tmp_path / "lines")
    write(sink, 1)
    assert [one.num_failed for one in getattr(sink, "sinks", [sink])] == [0] * len(getattr(sink, "sinks", [sink]))
    if "LinesSink" in namespace:
        assert (tmp_path / "lines-0").read_text() == f"1 {METRICS}\n"


# -- packages of the overlay ---------------------------------------------------------------------------------------


@pytest.mark.overlay
def test_wandb_offline_files_contain_every_iteration(tmp_path: Path) -> None:
    """Offline files of two jobs contain every iteration, including repeated ones."""
    script = (
        "import sys\nfrom outlast.integrations import metrics\n"
        "sink = metrics.WandbSink(project='p', mode='offline', directory=sys.argv[1])\n"
        "begin, end = map(int, sys.argv[2:])\n"
        "sink.begin_run(metrics.MetricsRun(run_id='gpt', iteration=begin))\n"
        "for iteration in range(begin + 1, end + 1):\n"
        "    sink({'outlast/goodput': 0.5}, iteration)\n"
        "sink.end_run(60)\n"
        "assert (sink.num_failed, sink.num_dropped) == (0, 0)\n"
    )
    for begin, end in ((0, 4), (2, 6)):
        run_python("-c", script, tmp_path, str(begin), str(end))
    steps = [read_wandb(path) for path in sorted(tmp_path.rglob("*.wandb"))]
    assert sorted(steps) == [[1, 2, 3, 4], [3, 4, 5, 6]]
    assert all(path.name == "run-gpt.wandb" for path in tmp_path.rglob("*.wandb"))


def read_wandb(path: Path) -> list[int]:
    """Return the iterations in an offline file: a LevelDB log after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, record_bytes, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # the rest of the block is too small for a header
            at += (1 << 15) - at % (1 << 15)
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record_bytes += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(record_bytes)
            record_bytes = b""
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                found.append(int(values["outlast/iteration"]))
    return found


@pytest.mark.overlay
def test_wandb_without_a_network_does_not_block_training(tmp_path: Path) -> None:
    """With W&B online and an unreachable server the training completes."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, outlast\nfrom outlast.integrations import metrics\n"
        "sink = metrics.WandbSink(project='p', mode='online')\n"
        "with outlast.init(outlast.Config(), log_metrics=sink) as run:\n"
        "    print([*run.steps({'w': torch.zeros(1)}, total=50)][-1], flush=True)\n"
    )
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_DIR": str(tmp_path)}
    assert run_python(script, **unreachable).stdout == "49\n"


@pytest.mark.overlay
def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of a run are one MLflow run, with every metric under its name and step."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    uri = f"file://{tmp_path}/mlruns"
    for begin, end in ((0, 4), (2, 6)):
        sink = metrics.MLflowSink(uri, experiment="pretraining")
        write(sink, *range(begin + 1, end + 1), run=MetricsRun(run_id="gpt", iteration=begin))
        assert (sink.num_failed, sink.num_dropped) == (0, 0)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("pretraining")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "gpt"
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "outlast/gpu_relative_perf/min")
    assert sorted(point.step for point in history) == [1, 2, 3, 3, 4, 4, 5, 6]


@pytest.mark.process
def test_session_passes_the_first_iteration_to_sinks(tmp_path: Path) -> None:
    """A sink gets the run and the iteration from which training continues."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, outlast\nfrom outlast.integrations import metrics\n"
        "class Told(metrics.BackgroundSink):\n"
        "    def _open(self, run): print('open', run.iteration, run.global_rank, flush=True)\n"
        "    def _write(self, figures, iteration): print('wrote', iteration, sorted(figures)[0], flush=True)\n"
        "    def _close(self): print('close', flush=True)\n"
        "config = outlast.Config(checkpoint=outlast.CheckpointConfig(directory=sys.argv[1], save_interval=2))\n"
        "with outlast.init(config, log_metrics=Told()) as run:\n"
        "    for iteration in run.steps({'w': torch.zeros(1)}, total=int(sys.argv[2])):\n"
        "        pass\n"
    )
    texts = [run_python(script, tmp_path / "ckpt", total).stdout.splitlines() for total in ("2", "3")]
    assert texts[0][0] == "open 0 0"
    assert texts[1][0] == "open 2 0"
    assert texts[1][-1] == "close"
    assert "wrote 3 outlast/goodput" in texts[1]
