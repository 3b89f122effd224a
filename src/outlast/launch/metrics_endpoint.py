"""The HTTP endpoint of a node for Prometheus, which lives as long as its agent.

:class:`MetricsEndpoint` answers each scrape in a thread; one more thread reads the node's journal every :data:`LOOK_S`.
A scraper that does not read or a disk that hangs blocks only its own thread, never the agent's loop. Connections are
limited in number and time. :mod:`outlast.launch.node_metrics` has the metrics.

Rejected: ``prometheus_client.start_http_server``, which limits neither.
"""

from __future__ import annotations

import logging
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from outlast.errors import ConfigError
from outlast.launch.node_metrics import METRICS, AgentOutlook, NodeHistory, Samples, collect, farthest, read_states
from outlast.runtime.addresses import Endpoint

log = logging.getLogger(__name__)
LOOK_S = 2.0
"""How often the journal is read, and the iteration is sampled for the rate."""
FIRST_LOOK_S = 0.2
"""The same until the journal has been read: counters must exist, at 0, before the first incident."""
MAX_CONNECTIONS = 16
"""Concurrent scrapes."""
SCRAPE_S = 10.0
"""How long a connection may wait for its peer."""


class MetricsEndpoint:
    """Serve this node's metrics.

    Args:
        where: Address and port; port 0: a free one.
        run_id: Name of the run.
        node: Name of the node.
        run_dir: The run directory.

    Raises:
        ConfigError: prometheus-client is not installed, or the port cannot be opened.

    Thread: any; no method waits for a scraper.
    """

    def __init__(self, where: Endpoint, *, run_id: str, node: str, run_dir: Path) -> None:
        try:
            from prometheus_client import CollectorRegistry, MetricsHandler
        except ImportError:
            raise ConfigError(
                "--metrics-port needs prometheus-client, which is not installed: pip install 'outlast[prometheus]'"
            ) from None
        self._outlook: Callable[[], AgentOutlook] = AgentOutlook
        self.history = NodeHistory(run_dir, node)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(
            _Collector({"run_id": run_id, "node": node}, lambda: collect(self._outlook(), self.history))
        )
        self._has_final, self._was_scraped = threading.Event(), threading.Event()
        """The metrics of the job's end are complete; a scraper has received them."""

        def answer(handler: Any) -> None:
            is_final = self._has_final.is_set()
            MetricsHandler.do_GET(handler)
            if is_final:
                self._was_scraped.set()

        members = {"registry": self._registry, "timeout": SCRAPE_S, "do_GET": answer}
        handler = type("_ScrapeHandler", (MetricsHandler,), members)
        try:
            self._server = _ScrapeServer(where, handler)
        except OSError as error:
            raise ConfigError(
                f"nothing can listen at {where} for --metrics-port ({error.strerror or error}); give each agent of a "
                "machine a different port, or 0 for a free one"
            ) from None
        self.url = f"http://{Endpoint(where.host, self._server.server_port)}/metrics"
        self._ends = threading.Event()
        serve = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="outlast-metrics-endpoint", daemon=True
        )
        look = threading.Thread(target=self._look_on, name="outlast-metrics-journal", daemon=True)
        for thread in (serve, look):
            thread.start()
        log.info("metrics of this node for Prometheus are at %s", self.url)

    def show(self, outlook: Callable[[], AgentOutlook]) -> None:
        """Serve the metrics of an agent from now on; ``outlook`` is called in other threads."""
        self._outlook = outlook

    def await_scrape(self, timeout_s: float) -> None:
        """Wait until a scraper has received the metrics of the job's end. Blocks: up to ``timeout_s``."""
        if timeout_s > 0 and not self._was_scraped.wait(timeout_s):
            log.warning("no scrape within %g s after the job's end: its exit code is in no metric", timeout_s)

    def close(self) -> None:
        """Stop listening; running scrapes end by themselves. Idempotent. Blocks: about 0.1 s."""
        if not self._ends.is_set():
            self._ends.set()
            self._server.shutdown()
            self._server.server_close()

    # -- in threads of its own ---------------------------------------------------------------------------------

    def _look_on(self) -> None:
        while not self._ends.wait(LOOK_S if self.history.has_read else min(FIRST_LOOK_S, LOOK_S)):
            try:
                outlook = self._outlook()
                states = read_states(outlook)
                self.history.note_iteration(outlook.cycle.number if outlook.cycle else -1, farthest(states))
                self.history.read_on(outlook.job, [state.global_rank for state in states])
                if outlook.exit_code is not None:
                    self._has_final.set()
            except Exception:
                log.exception("metrics of the journal cannot be updated; those of the heartbeat memory are still shown")
                return


class _Collector:
    """Make metric families as the Prometheus client expects them."""

    def __init__(self, own: dict[str, str], samples: Callable[[], Samples]) -> None:
        self._own, self._samples = own, samples

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, labels, value in self._samples():
            metric = METRICS[name]
            if name not in families:
                kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
                families[name] = kind(f"outlast_{name}", metric.help, labels=[*self._own, *metric.labels])
            values = [*self._own.values(), *(labels[label] for label in metric.labels)]
            families[name].add_metric(values, float(value))
        yield from families.values()


class _ScrapeServer(ThreadingHTTPServer):
    """Serve each connection in a thread, at most :data:`MAX_CONNECTIONS` at a time."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, where: Endpoint, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = where.family
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((where.host, where.port), handler)

    def server_bind(self) -> None:
        """Bind without the base class's reverse name lookup, which may take long."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread if the limit permits."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what ended a connection early; the base class prints a traceback."""
        log.debug("a scrape from %s ended before its time", client_address, exc_info=True)
