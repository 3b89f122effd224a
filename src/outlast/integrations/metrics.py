"""Metric sinks for a session: TensorBoard, Weights & Biases, MLflow, Prometheus, OpenTelemetry, or a callable.

A sink is passed to ``outlast.init(config, log_metrics=...)``. The training loop only puts metrics into a queue, and a
thread of the sink writes them. So no step waits for a full disk, a missing network or an exception: records that do not
fit into the queue are dropped, counted and reported.

Rejected: writing in the training loop with a timeout, since a blocking system call cannot be interrupted; an unbounded
queue, since a logger that is unavailable for hours would exhaust the memory of the run.

Packages are imported when a sink is created, not with this module.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outlast import clock, env
from outlast.config.base import require
from outlast.errors import ConfigError
from outlast.incidents import IncidentKind
from outlast.runtime.exits import at_exit, forget_at_exit
from outlast.runtime.files import write_optional
from outlast.session.metrics import MetricsRun, MetricsSink
from outlast.wording import count

__all__ = [
    "BackgroundSink",
    "CallableSink",
    "MLflowSink",
    "MetricsRun",
    "MetricsSink",
    "OpenTelemetrySink",
    "PrometheusSink",
    "SeveralSinks",
    "TensorBoardSink",
    "WandbSink",
]

log = logging.getLogger(__name__)
MAX_QUEUED = 1024
"""Records (the metrics of a step, or of a save) that may wait for a sink; further ones are dropped."""
RETRY_S = 30.0
"""A sink that could not be opened is retried after this time; a sink whose writes fail for this long is reopened."""
EXIT_S = 0.5
"""How long the exit of the process waits for sinks that were not closed, for example after an exception."""
CLOSING_S = 10.0
"""How long a sink waits for an earlier one of its kind that is still closing."""
_TEXTFILE_S = 5.0


class BackgroundSink(ABC):
    """Write metrics in a thread, so that no step waits for them. Subclass it for a logger of your own.

    A subclass implements :meth:`_open`, :meth:`_write`, :meth:`_flush` and :meth:`_close`, which run in the sink's
    thread, and may block and raise. An exception is logged once. A sink whose writes all fail for 30 s is closed and
    reopened.

    Args:
        every_rank: All ranks write, each to a separate place, instead of rank 0 alone.
        max_queued: Records (the metrics of a step, or of a save) that may wait.

    Raises:
        ConfigError: A value is out of range.

    Thread: the thread of the training loop.
    """

    _is_alone = False
    """Whether two sinks of this type must not be open at the same time, as they share a port or a run."""

    def __init__(self, *, every_rank: bool = False, max_queued: int = MAX_QUEUED) -> None:
        require(max_queued >= 1, f"max_queued={max_queued} must be at least 1")
        self.every_rank = every_rank
        self.num_dropped = 0
        """Records that did not fit into the queue."""
        self.num_failed = 0
        """Records that could not be written."""
        self._max_queued = max_queued
        self._queue = deque[tuple[dict[str, float], int]]()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        self._is_ending = threading.Event()
        self._run: MetricsRun | None = None
        self._flush_due_s: float | None = None
        """When to call :meth:`_flush` although nothing new was written; ``None`` = not."""
        self._logged = set[str]()

    # -- the training loop's side ----------------------------------------------------------------------------------

    def __call__(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Queue metrics. Blocks: never."""
        if self._run is None:  # called by the script's own function, which only passes metrics
            place = env.read_worker()
            forget_at_exit(self.end_run)
            at_exit(self.end_run, EXIT_S)  # no session ends the sink
            where = {name: getattr(place, name) for name in ("run_id", "global_rank", "local_rank", "world_size")}
            self.begin_run(MetricsRun(iteration=max(0, iteration - 1), **where))
        if self._thread is None:
            return
        if len(self._queue) >= self._max_queued:
            self.num_dropped += 1
            self._log_once("%s cannot keep up: metrics are dropped, training continues")
            return
        # Convert now: the script may change a tensor or array before the sink's thread reads it.
        numbers = {name: float(value) if hasattr(value, "__float__") else value for name, value in metrics.items()}
        self._queue.append((numbers, iteration))
        self._wake.set()

    def begin_run(self, run: MetricsRun) -> None:
        """Start the sink, on the ranks that write.

        Raises:
            ConfigError: The sink cannot work on this rank.
        """
        if self._thread is not None:
            self.end_run(0.0)
        self._run = run
        self._check(run)
        if run.global_rank == 0 or self.every_rank:
            self._is_ending, self._wake, self._queue = threading.Event(), threading.Event(), deque()
            _LEFT[:] = [(kind, thread) for kind, thread in _LEFT if thread.is_alive()]
            earlier = [thread for kind, thread in _LEFT if self._is_alone and kind is type(self)]
            work = _SinkThread(self, run, self._queue, self._wake, self._is_ending, earlier)
            self._thread = threading.Thread(target=work.run, name=f"outlast-{type(self).__name__}", daemon=True)
            self._thread.start()

    def end_run(self, timeout_s: float = 5.0) -> None:
        """Write the queued records and close. Idempotent. Blocks: up to ``timeout_s`` seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_ending.set()
        self._wake.set()
        self._run = None
        thread.join(max(0.0, timeout_s))
        if thread.is_alive():
            _LEFT.append((type(self), thread))
        if timeout_s <= 0:
            return
        if thread.is_alive():
            lost = f"; {count(len(self._queue), 'record')} of metrics not written" if self._queue else ""
            log.warning("%s did not end within %g s%s", self.name, timeout_s, lost)
        if self.num_dropped or self.num_failed:
            dropped, failed = count(self.num_dropped, "record"), count(self.num_failed, "record")
            text = "%s: %s of metrics dropped because the sink could not keep up, %s not written"
            log.warning(text, self.name, dropped, failed)

    @property
    def name(self) -> str:
        """Name in log lines."""
        return type(self).__name__

    def _check(self, run: MetricsRun) -> None:  # noqa: B027  most sinks work on all ranks
        """Raise ConfigError if the sink cannot work on this rank. Thread: the thread of the training loop."""

    # -- the thread's side -----------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, run: MetricsRun) -> None:
        """Open the sink for a run; retried later if it raises."""

    @abstractmethod
    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write the metrics of one iteration; an iteration may be written again after a restart."""

    def _flush(self) -> None:  # noqa: B027  not each sink buffers
        """Make written metrics visible; called once the queue is empty."""

    def _close(self) -> None:  # noqa: B027  not each sink has something open
        """Close the sink."""

    def _log_once(self, text: str, *values: object, level: int = logging.WARNING) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.log(level, text, self.name, *values)

    def _log_missing_id(self, run: MetricsRun) -> None:
        text = "%s: the run has no id, so that a restart begins another one there; give it an id (--rdzv-id)"
        self._log_once(text, level=logging.WARNING if run.global_rank == 0 else logging.DEBUG)


_LEFT: list[tuple[type[BackgroundSink], threading.Thread]] = []
"""Threads of sinks that are still closing."""


def _wait_at_exit() -> None:
    _join([thread for _, thread in _LEFT], EXIT_S)


at_exit(_wait_at_exit)


def _join(threads: list[threading.Thread], timeout_s: float) -> None:
    """Wait for threads. Blocks: up to ``timeout_s`` seconds, for all together."""
    until_s = clock.now_s() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - clock.now_s()))


@dataclass
class _SinkThread:
    """The thread of a sink for one run; the thread of a later run has its own queue.

    Thread: the sink's own.
    """

    _sink: BackgroundSink
    _of: MetricsRun
    _queue: deque[tuple[dict[str, float], int]]
    _wake: threading.Event
    """Set when a record was queued, or the run ends."""
    _is_ending: threading.Event
    _earlier: list[threading.Thread]
    """Threads of other sinks, which must have ended before this sink is opened."""
    _is_open: bool = False
    _failing_since_s: float | None = None
    _tried_s: float | None = None

    def run(self) -> None:
        """Write until the run ends; begin once the thread of an earlier run has ended."""
        with self._sink._turn:
            self._write_all()

    def _write_all(self) -> None:
        while not (self._is_ending.is_set() and not self._queue):
            due_s = self._sink._flush_due_s if self._is_open else None
            self._wake.wait(None if due_s is None else max(0.0, due_s - clock.now_s()))
            self._wake.clear()
            while self._queue:
                self._hand_on()
            if self._is_open:
                self._try(self._sink._flush)
        if self._is_open:
            self._try(self._sink._close)

    def _hand_on(self) -> None:
        metrics, iteration = self._queue[0]
        if self._is_open and self._failing_since_s is not None and clock.now_s() - self._failing_since_s >= RETRY_S:
            self._try(self._sink._close)
            self._is_open, self._tried_s = False, None
            self._of = replace(self._of, iteration=max(0, iteration - 1))
        if not self._is_open:
            self._open()
        if self._is_open and self._try(lambda: self._sink._write(metrics, iteration)):
            self._failing_since_s = None
        else:
            self._sink.num_failed += 1
            if self._is_open and self._failing_since_s is None:
                self._failing_since_s = clock.now_s()
        self._queue.popleft()  # only now is the record written

    def _open(self) -> None:
        if self._tried_s is not None and clock.now_s() - self._tried_s < RETRY_S:
            return
        _join(self._earlier, CLOSING_S)
        self._earlier = []
        self._tried_s, self._failing_since_s, self._sink._flush_due_s = clock.now_s(), None, None
        self._is_open = self._try(lambda: self._sink._open(self._of))

    def _try(self, what: Callable[[], object]) -> bool:
        try:
            what()
        except (
            BaseException
        ) as error:  # an exception of a logger, also sys.exit(), must end neither training nor this thread
            log.debug("%s failed", self._sink.name, exc_info=True)
            words = " ".join(str(error).split())[:500]
            self._sink._log_once("%s failed (%s: %s); training continues", type(error).__name__, words)
            return False
        return True


class SeveralSinks:
    """Pass metrics to several sinks; one that blocks does not delay the others.

    Args:
        *sinks: The sinks; a plain callable is called in the thread of a :class:`CallableSink`, on rank 0.
    """

    def __init__(self, *sinks: Callable[[dict[str, float], int], object]) -> None:
        self.sinks = [sink if isinstance(sink, MetricsSink) else CallableSink(sink) for sink in sinks]

    def __call__(self, metrics: dict[str, float], iteration: int) -> None:
        """Queue metrics. Blocks: never, unless a sink of your own does."""
        for sink in self.sinks:
            sink(metrics, iteration)

    def begin_run(self, run: MetricsRun) -> None:
        """Start all sinks.

        Raises:
            ConfigError: One of them cannot work here; the others are started.
        """
        refused: ConfigError | None = None
        for sink in self.sinks:
            try:
                sink.begin_run(run)
            except ConfigError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def end_run(self, timeout_s: float = 5.0) -> None:
        """End all sinks. Blocks: up to ``timeout_s`` seconds, for all together."""
        until_s = clock.now_s() + timeout_s
        if timeout_s > 0:
            for sink in self.sinks:  # all sinks write their last records concurrently
                if isinstance(sink, BackgroundSink):
                    sink._is_ending.set()
                    sink._wake.set()
        for sink in self.sinks:
            sink.end_run(max(0.01, until_s - clock.now_s()) if timeout_s > 0 else 0.0)


class CallableSink(BackgroundSink):
    """Call a function in a separate thread, so that it may block.

    Args:
        function: Takes metrics by name, and the number of optimizer steps done.
        every_rank: Call it on all ranks, instead of on rank 0 alone.
        max_queued: Records that may wait.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(
        self,
        function: Callable[[dict[str, float], int], object],
        *,
        every_rank: bool = False,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        super().__init__(every_rank=every_rank, max_queued=max_queued)
        self._function = function

    def _open(self, run: MetricsRun) -> None:
        """There is nothing to open."""

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._function(dict(metrics), iteration)


class TensorBoardSink(BackgroundSink):
    """Write event files for TensorBoard, with ``tensorboardX``, else with ``torch.utils.tensorboard``.

    After a restart TensorBoard ignores earlier records of iterations that are repeated (``purge_step``).

    Args:
        log_dir: The folder of event files; with ``every_rank`` each rank has a folder ``rank-N`` in it.
        every_rank: All ranks write, instead of rank 0 alone.
        max_queued: Records that may wait.

    Raises:
        ImportError: Neither package is installed; the message has the command to install one.
        ConfigError: A value is out of range.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str], *, every_rank: bool = False, max_queued: int = MAX_QUEUED
    ) -> None:
        super().__init__(every_rank=every_rank, max_queued=max_queued)
        self.log_dir = Path(log_dir)
        try:
            self._writer_type = importlib.import_module("tensorboardX").SummaryWriter
        except ImportError:
            self._writer_type = _require("torch.utils.tensorboard", "tensorboard", "TensorBoardSink").SummaryWriter
        self._writer: Any = None

    def _open(self, run: MetricsRun) -> None:
        folder = self.log_dir / f"rank-{run.global_rank}" if self.every_rank else self.log_dir
        purge = run.iteration + 1 if any(folder.glob("events.out.*")) else None
        # File names have whole seconds: a restart within one would replace the file. TensorBoard reads files by name.
        suffix = f".{clock.now_ns():020d}"
        self._writer = self._writer_type(str(folder), purge_step=purge, filename_suffix=suffix)

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def _flush(self) -> None:
        self._writer.flush()

    def _close(self) -> None:
        self._writer.close()


class WandbSink(BackgroundSink):
    """Log to a run of Weights & Biases, which a restarted job continues if outlast's run has an id.

    The axis of metrics is ``outlast/iteration``, not W&B's own step, which must not decrease: iterations that are
    repeated after a restart are logged again and not refused. If a run is active in this process (``wandb.run``), the
    sink logs to it and leaves it open.

    Args:
        project: As ``wandb.init`` has it, and so the next ones; ``None`` = W&B's own settings.
        entity: The team or user.
        name: Name of the run; ``None`` = the id of outlast's run, and without one a name drawn by W&B.
        group: The group of runs; ``None`` = the id of outlast's run with ``every_rank``, else none.
        mode: ``online``, ``offline`` or ``disabled``; ``None`` = W&B's own settings (``WANDB_MODE``). For nodes without
            a network use ``offline``, and ``wandb sync`` later.
        directory: Folder of offline files; ``None`` = W&B's own settings.
        settings: More arguments of ``wandb.init``.
        every_rank: All ranks log, each to a separate run, instead of rank 0 alone.
        max_queued: Records that may wait.

    Raises:
        ImportError: ``wandb`` is not installed; the message has the command to install it.
        ConfigError: A value is out of range.
    """

    _is_alone = True

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        mode: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        every_rank: bool = False,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        super().__init__(every_rank=every_rank, max_queued=max_queued)
        require(mode in (None, "online", "offline", "disabled"), f"mode={mode!r} is not online, offline or disabled")
        self._wandb = _require("wandb", "wandb", "WandbSink")
        self._settings = {"project": project, "entity": entity, "mode": mode, **(settings or {})}
        self._name, self._group = name, group
        if directory is not None:
            self._settings["dir"] = str(directory)
        self._wandb_run: Any = None
        self._is_own = False

    def _open(self, run: MetricsRun) -> None:
        self._wandb_run, self._is_own = self._wandb.run, False
        if self._wandb_run is None:
            own = _own_name(run, each=self.every_rank)
            names = {"name": self._name or own, "group": self._group}
            if _has_id(run):
                names["id"] = re.sub(r"[/\\#?%:]", "-", own or "")  # W&B takes none of these
                names["group"] = self._group or (run.run_id if self.every_rank else None)
                names["resume"] = "allow"
            elif "id" not in self._settings:
                self._log_missing_id(run)
            self._wandb_run, self._is_own = self._wandb.init(**{**names, **self._settings}), True
        self._wandb_run.define_metric("outlast/iteration", hidden=True)
        self._wandb_run.define_metric("outlast/*", step_metric="outlast/iteration")

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._wandb_run.log({**metrics, "outlast/iteration": iteration})

    def _close(self) -> None:
        if self._is_own:
            self._wandb_run.finish()


class MLflowSink(BackgroundSink):
    """Log to a run of MLflow, which a restarted job continues if outlast's run has an id.

    The run is found by the tag ``outlast.run_id``. Iterations that are repeated after a restart are recorded twice,
    with the same step; MLflow keeps both.

    Args:
        tracking_uri: A server, or a folder; ``None`` = MLflow's own settings (``MLFLOW_TRACKING_URI``).
        experiment: Name of the experiment; created if it does not exist.
        run_name: ``None`` = the id of outlast's run, and without one a name drawn by MLflow.
        every_rank: All ranks log, each to a separate run, instead of rank 0 alone.
        max_queued: Records that may wait.

    Raises:
        ImportError: ``mlflow`` is not installed; the message has the command to install it.
        ConfigError: A value is out of range.
    """

    _is_alone = True

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "Default",
        run_name: str | None = None,
        every_rank: bool = False,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        super().__init__(every_rank=every_rank, max_queued=max_queued)
        self._mlflow = _require("mlflow", "mlflow", "MLflowSink")
        self._tracking_uri, self._experiment, self._run_name = tracking_uri, experiment, run_name
        self._client: Any = None
        self._mlflow_run_id = ""

    def _open(self, run: MetricsRun) -> None:
        client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        own = _own_name(run, each=self.every_rank)
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = client.create_experiment(self._experiment) if found is None else found.experiment_id
        tags, runs = {}, []
        if own is not None and _has_id(run):
            tags["outlast.run_id"] = quoted = own.replace("'", "")
            runs = client.search_runs([experiment_id], f"tags.`outlast.run_id` = '{quoted}'", max_results=1)
        else:
            self._log_missing_id(run)
        if runs:
            self._mlflow_run_id = runs[0].info.run_id
            client.update_run(self._mlflow_run_id, status="RUNNING")
        else:
            made = client.create_run(experiment_id, tags=tags, run_name=self._run_name or own)
            self._mlflow_run_id = made.info.run_id
        self._client = client

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        now_ms = self._mlflow.utils.time.get_current_time_millis()
        rows = [self._mlflow.entities.Metric(name, value, now_ms, iteration) for name, value in metrics.items()]
        self._client.log_batch(self._mlflow_run_id, metrics=rows)

    def _close(self) -> None:
        self._client.set_terminated(self._mlflow_run_id)


class PrometheusSink(BackgroundSink):
    """Keep metrics as Prometheus gauges: at an HTTP endpoint, in a file for the node exporter, or in a registry.

    ``outlast/step_time_s`` becomes ``outlast_step_time_seconds``; the kinds of ``outlast/incidents/<kind>`` and the
    statistics of the scores are labels (``kind``, ``stat``). Every gauge has the label ``run_id``, and with
    ``every_rank`` also ``rank``: about 30 series for each rank that writes. Each kind of incident is exported from the
    start, at 0, so that the first incident is an increase.

    Args:
        port: Port of the endpoint: HTTP without encryption or authentication. With ``every_rank`` each rank of a node
            adds its local rank. 0 = a free port, see :attr:`url`; ``None`` = no endpoint.
        address: Address of the endpoint. A loopback address excludes other machines.
        textfile: A ``.prom`` file that is replaced at most every 5 s, for the textfile collector of the node exporter;
            with ``every_rank`` the rank is added to its name.
        registry: Registry of the gauges, if your own server exports it; ``None`` = a separate registry.
        every_rank: All ranks write, instead of rank 0 alone.
        max_queued: Records that may wait.

    Raises:
        ImportError: ``prometheus-client`` is not installed; the message has the command to install it.
        ConfigError: The gauges would not be exported, or a value is out of range.
    """

    _is_alone = True

    def __init__(
        self,
        *,
        port: int | None = None,
        address: str = "127.0.0.1",
        textfile: str | os.PathLike[str] | None = None,
        registry: Any = None,
        every_rank: bool = False,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        super().__init__(every_rank=every_rank, max_queued=max_queued)
        text = "PrometheusSink() shows its gauges nowhere; give it port, textfile or registry"
        require((port, textfile, registry) != (None, None, None), text)
        text = f"port={port} is not a valid port; write a number from 1 to 65535, or 0 for a free one"
        require(port is None or 0 <= port < 65536, text)
        text = f"textfile={str(textfile)!r} must end with .prom: the node exporter reads no others"
        require(textfile is None or Path(textfile).suffix == ".prom", text)
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise ConfigError(
                f"address={address!r} is not an IP address; write 127.0.0.1, or the address of an interface"
            ) from None
        self._client = _require("prometheus_client", "prometheus", "PrometheusSink")
        self.url: str | None = None
        """URL of the endpoint, once it listens; ``None`` = none."""
        self.registry = self._client.CollectorRegistry() if registry is None else registry
        self._port, self._address = port, address
        self._textfile = self._file = None if textfile is None else Path(textfile)
        self._gauges: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        self._server: Any = None
        self._wrote_s: float | None = None

    def _check(self, run: MetricsRun) -> None:
        port, rank = self._port_of(run), run.local_rank
        text = f"port={self._port} leaves no port to local rank {rank}, which would have {port}"
        require(port is None or port < 65536, f"{text}; give PrometheusSink() a smaller one")

    def _port_of(self, run: MetricsRun) -> int | None:
        return self._port + run.local_rank if self._port and self.every_rank else self._port

    def _open(self, run: MetricsRun) -> None:
        self._labels = {"run_id": run.run_id} | ({"rank": str(run.global_rank)} if self.every_rank else {})
        if self._textfile is not None and self.every_rank:
            self._file = self._textfile.with_name(f"{self._textfile.stem}-rank-{run.global_rank}.prom")
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._port is not None and self._server is None:
            self._server, _ = self._client.start_http_server(self._port_of(run), self._address, self.registry)
            host = f"[{self._address}]" if ":" in self._address else self._address
            self.url = f"http://{host}:{self._server.server_port}/metrics"
            log.info("serving metrics for Prometheus at %s", self.url)

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        failure: Exception | None = None
        zeros = (
            {} if "outlast_incidents" in self._gauges else {f"outlast/incidents/{kind}": 0.0 for kind in IncidentKind}
        )
        for name, value in {**zeros, **metrics, "outlast/iteration": float(iteration)}.items():
            try:
                self._set(name, value)
            except Exception as error:  # noqa: BLE001 - the other metrics are still exported
                failure = failure or error
        if failure is not None:
            raise failure

    def _set(self, name: str, value: float) -> None:
        base, label, text = _split(name)
        gauge = re.sub(r"[^a-zA-Z0-9_:]", "_", re.sub(r"_s$", "_seconds", base))
        labels = self._labels | ({label: text} if label else {})
        if gauge not in self._gauges:
            self._gauges[gauge] = self._client.Gauge(
                gauge, f"outlast metric {base}", list(labels), registry=self.registry
            )
        self._gauges[gauge].labels(**labels).set(value)

    def _flush(self) -> None:
        if self._file is None:
            return
        now_s, self._flush_due_s = clock.now_s(), None
        if self._wrote_s is not None and now_s - self._wrote_s < _TEXTFILE_S:
            self._flush_due_s = self._wrote_s + _TEXTFILE_S
            return
        self._wrote_s = now_s
        self._write_textfile()

    def _write_textfile(self) -> None:
        if (file := self._file) is not None:
            write_optional("metrics", file, lambda: self._client.write_to_textfile(str(file), self.registry))

    def _close(self) -> None:
        self._write_textfile()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = self.url = None
        for gauge in self._gauges.values():  # a later run registers new gauges
            self.registry.unregister(gauge)
        self._gauges = {}


class OpenTelemetrySink(BackgroundSink):
    """Record metrics as gauges of OpenTelemetry.

    ``outlast/step_time_s`` becomes ``outlast.step_time`` with the unit ``s``; the kinds of ``outlast/incidents/<kind>``
    and the statistics of the scores are attributes (``kind``, ``stat``), in addition to ``outlast.run_id`` and
    ``outlast.rank``.

    Args:
        meter_provider: The provider; ``None`` = the global one of the process.
        every_rank: All ranks record, instead of rank 0 alone.
        max_queued: Records that may wait.

    Raises:
        ImportError: ``opentelemetry`` is not installed; the message has the command to install it.
        ConfigError: A value is out of range.
    """

    def __init__(self, meter_provider: Any = None, *, every_rank: bool = False, max_queued: int = MAX_QUEUED) -> None:
        super().__init__(every_rank=every_rank, max_queued=max_queued)
        self._api = _require("opentelemetry.metrics", "opentelemetry", "OpenTelemetrySink")
        self._provider = meter_provider
        self._gauges: dict[str, Any] = {}
        self._attributes: dict[str, str | int] = {}
        self._meter: Any = None

    def _open(self, run: MetricsRun) -> None:
        provider = self._api.get_meter_provider() if self._provider is None else self._provider
        self._meter = provider.get_meter("outlast")
        self._provider = provider
        self._attributes = {"outlast.run_id": run.run_id, "outlast.rank": run.global_rank}

    def _write(self, metrics: Mapping[str, float], iteration: int) -> None:
        for name, value in {**metrics, "outlast/iteration": float(iteration)}.items():
            base, label, text = _split(name)
            if base not in self._gauges:
                unit = "s" if base.endswith("_s") else "1"
                self._gauges[base] = self._meter.create_gauge(base.removesuffix("_s").replace("/", "."), unit=unit)
            self._gauges[base].set(value, self._attributes | ({label: text} if label else {}))

    def _close(self) -> None:
        if (flush := getattr(self._provider, "force_flush", None)) is not None:
            flush()


def _has_id(run: MetricsRun) -> bool:
    """Return whether the user or a launcher has set the run's id; the defaults are shared by unrelated runs."""
    return run.run_id not in ("", "default", "none")


def _own_name(run: MetricsRun, *, each: bool) -> str | None:
    """Return the default name of a rank's run; ``None`` = no name would be unique."""
    words = [run.run_id] * _has_id(run) + [f"rank-{run.global_rank}"] * each
    return "-".join(words) or None


def _split(name: str) -> tuple[str, str, str]:
    """Return a metric's name without its label, the label, and the label's value; without a label both are empty."""
    base, _, last = name.rpartition("/")
    if base.endswith("/incidents"):
        return base, "kind", last
    if base.endswith("_perf"):
        return base, "stat", last
    return name, "", ""


def _require(module: str, extra: str, what: str) -> Any:
    """Import a package that a sink needs.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        missing = package if module != "torch.utils.tensorboard" else "tensorboard"
        raise ImportError(
            f"{what} needs {missing}, which is not installed: pip install 'outlast[{extra}]'", name=missing
        ) from error
