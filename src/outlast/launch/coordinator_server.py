"""The coordinator's host: feeds the coordinator from the control store, in a thread of the agent that hosts it.

The store is soft state: it holds messages under way and beats, nothing that could not be sent again.

Keys: ``job`` (names the job), ``host`` (names the node that hosts the store), ``lifelines`` (their port), ``inbox``
(queue: agents -> coordinator), ``to/<node>/<epoch>`` (queue: coordinator -> agent), ``beat/<node>/<epoch>`` (counter),
``status`` (JSON for whoever asks how the job is: :class:`outlast.launch.protocol.LiveStatus`, at most a beat old).

Lifelines are connections that carry nothing, and whose end shows that an agent died. The kernel closes a killed
process's sockets at once, long before its beats are missed. A connection can also break for reasons of the network, so
its end is a question, not an answer: an agent that lives connects again at once, and only one that does not within
:data:`PATIENCE_S` is taken for dead. What dies without closing anything (a machine without power) its beats reveal.

Rejected: judging by the store's own connections (``TCPStore`` does not report them), and beats so frequent that a miss
is noticed as soon (a loaded machine misses such beats).
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch.distributed import DistError

from outlast import clock
from outlast.config.sources import LayeredSettings
from outlast.decoding import from_json
from outlast.errors import ConfigError, RendezvousError
from outlast.incidents import EventKind
from outlast.launch import protocol as m
from outlast.launch.coordinator import Coordinator
from outlast.launch.membership import JobSettings
from outlast.launch.verdicts import load_ladder, save_ladder
from outlast.monitor.watchdog import LearnedTimeouts
from outlast.policy.deadlines import Expired, Observation
from outlast.policy.ladder import LadderState
from outlast.runtime.journal import Journal
from outlast.runtime.store import TCPStore

log = logging.getLogger(__name__)
_FOREVER = datetime.timedelta(days=365)


def channel_key(node: str, epoch: str) -> str:
    """Return the key of the queue from the coordinator to one life of a node's agent."""
    return f"to/{node}/{epoch}"


def beat_key(node: str, epoch: str) -> str:
    """Return the key of the counter that one life of a node's agent advances."""
    return f"beat/{node}/{epoch}"


class CoordinatorServer:
    """Run the coordinator of a job.

    Args:
        store: The store that this process hosts.
        settings: The job's settings.
        run_dir: Where ``ladder.json`` and ``ft_state.json`` are kept; ``None``: nowhere.
        run_id: Name of the run.
        node: Name of this node, for the journal.
        layers: What options and file of ``outlast run`` set; what they do not, the script's config may.
        on_error: Called in the server's thread with what ended it before its time.
        may_write: Says whether the run directory is still this job's.

    Thread: owns one; :meth:`start` and :meth:`close` are called by the agent's main thread.
    """

    def __init__(
        self,
        store: TCPStore,
        settings: JobSettings,
        *,
        run_dir: Path | None,
        run_id: str,
        node: str,
        layers: LayeredSettings,
        on_error: Callable[[BaseException], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._settings = settings
        self._run_dir = run_dir
        self._run_id, self._node = run_id, node
        self._layers, self._config = layers, layers.config
        self._on_error, self._may_write = on_error, may_write
        self._journal = Journal(run_dir, run_id=run_id, job=settings.job, node=node, proc="coordinator")
        state = load_ladder(run_dir, is_new_job=settings.former_host is None, is_named=settings.is_named)
        self._coordinator = Coordinator(
            settings,
            msgspec.structs.replace(state, job=settings.job),
            record=self._record,
            remember=self._remember,
            learn=self._learn,
            tell_time=self._journal.tell_time,
        )
        self._published_phase: m.JobPhase | None = None
        self._inbox = store.clone()
        self._inbox.set_timeout(_FOREVER)
        self._judged_at_s = clock.now_s()
        self._thread = threading.Thread(target=self._run, name="outlast-coordinator", daemon=True)
        self.closed = threading.Event()
        """Set once every node has learned that the job is over, or had long enough to."""
        self._lifelines = LifelineServer("", self._on_death)
        store.multi_set(["job", "host", "lifelines"], [settings.job, node, str(self._lifelines.port)])

    @property
    def is_finished(self) -> bool:
        """Whether an earlier job finished the run."""
        return self._coordinator.state.finished

    def start(self) -> None:
        """Start serving."""
        self._lifelines.start()
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the threads."""
        self._lifelines.close()
        if self._thread.is_alive():
            try:
                self._store.queue_push("inbox", m.encode(m.Quit()))
            except (DistError, RuntimeError) as error:
                log.debug("the coordinator did not get the request to quit: %s", error)
            self._thread.join(timeout_s)
        self._journal.close()

    def _run(self) -> None:
        try:
            self._publish()
            while self._serve_one():
                pass
        except BaseException as error:
            log.exception("the coordinator ended on an error")
            self._on_error(error)
        finally:
            self.closed.set()

    def _serve_one(self) -> bool:
        data = self._inbox.queue_pop("inbox", block=True)
        try:
            message = m.decode_to_coordinator(bytes(data))
        except RendezvousError as error:
            log.warning("%s", error)
            return True
        if isinstance(message, m.ScriptSettings):
            self._take_script_settings(message)
        now_s = clock.now_s()
        outbox = self._coordinator.handle(message, now_s)
        if isinstance(message, m.CoordinatorTick):
            outbox += self._judge_beats(now_s)
        for node, epoch, reply in outbox:
            self._store.queue_push(channel_key(node, epoch), m.encode(reply))
        if isinstance(message, m.CoordinatorTick) or self._coordinator.phase != self._published_phase:
            self._publish()
        if self._coordinator.may_close or self._coordinator.should_give_up_on_goodbyes(now_s):
            self.closed.set()
        return not isinstance(message, m.Quit)

    def _publish(self) -> None:
        """Say in the store how the job is; once a beat, since it costs O(nodes), and when the phase changes."""
        self._published_phase = self._coordinator.phase
        status = self._coordinator.status(
            clock.now_s(),
            time=self._journal.tell_time(),
            run_id=self._run_id,
            run_dir=self._run_dir,
            host=self._node,
        )
        self._store.set(m.STATUS_KEY, m.encode(status))

    def _judge_beats(self, now_s: float) -> list[tuple[str, str, m.ToNode]]:
        nodes = list(self._coordinator.nodes)
        if not nodes:
            return []
        counters = self._store.multi_get([beat_key(node.name, node.epoch) for node in nodes])
        beats = {node.name: int(counter) for node, counter in zip(nodes, counters, strict=True)}
        since_s, self._judged_at_s = now_s - self._judged_at_s, now_s
        return self._coordinator.judge_beats(beats, now_s, since_last_s=since_s)

    def _take_script_settings(self, told: m.ScriptSettings) -> None:
        """Use what the script's config sets and no option or file does; it may be another one in the next cycle."""
        try:
            self._layers = self._layers.with_script(told.fault_tolerance or "{}")
        except ConfigError as error:
            log.warning("the settings of node %s's script are not used: %s", told.node, error)
            return
        self._config = config = self._layers.config
        settings = self._coordinator.settings
        least = config.min_nodes
        if least is not None and least > settings.num_slots:
            log.warning(
                "fault_tolerance.min_nodes=%d of the script's config is more than the %d nodes of --nnodes; not used",
                *(least, settings.num_slots),
            )
            least = settings.min_nodes
        limits = dataclasses.replace(
            settings.limits,
            max_no_progress_cycles=config.max_no_progress_cycles,
            max_node_faults=config.max_node_faults,
        )
        self._coordinator.resettle(dataclasses.replace(settings, limits=limits, min_nodes=least))

    def _on_death(self, node: str, epoch: str, reason: str) -> None:
        self._store.queue_push("inbox", m.encode(m.Dead(node=node, epoch=epoch, reason=reason)))

    # -- what the coordinator has others do --------------------------------------------------------------------

    def _record(self, kind: EventKind, cycle: int, data: dict[str, object]) -> None:
        self._journal.write(kind, cycle=cycle, rank=None, iteration=None, **data)

    def _remember(self, state: LadderState) -> None:
        if self._run_dir is None or not self._may_write():
            return
        try:
            save_ladder(self._run_dir, state)
        except OSError as error:
            log.warning("ladder.json cannot be written (%s): later jobs will not know which remedies were tried", error)

    def _learn(self, cycle: int, observations: list[Observation], expired: list[Expired] | None) -> None:
        if not self._config.calc_ft_timeouts or self._run_dir is None or not self._may_write():
            return
        learned = LearnedTimeouts.load(self._run_dir)
        learned.merge(
            observations,
            cycle=f"{self._settings.job}/{cycle}",
            config=self._config,
            finished=expired is None,
            faulted=expired or (),
        )
        try:
            learned.save()
        except OSError as error:
            log.warning("%s cannot be written (%s): timeouts learned in cycle %d are lost", learned.path, error, cycle)


PATIENCE_S = 0.3
"""How long an agent has to connect again."""
_MAX_HELLO_BYTES = 4096


class _LifelineHello(msgspec.Struct, frozen=True):
    node: str
    epoch: str


class LifelineServer:
    """Hold every agent's lifeline, in a thread of the control store's host.

    Args:
        host: Address to listen at; the port is a fresh one.
        on_death: Called in the server's thread with the node, its epoch, and what was seen.
    """

    def __init__(self, host: str, on_death: Callable[[str, str, str], None]) -> None:
        self._on_death = on_death
        self._listener = socket.create_server((host, 0), backlog=2048, reuse_port=False)
        self.port: int = self._listener.getsockname()[1]
        self._stop_read, self._stop_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._held: dict[socket.socket, _LifelineHello | None] = {}
        self._suspects: dict[_LifelineHello, float] = {}
        """Whose lifeline ended, and when they are taken for dead."""
        self._thread = threading.Thread(target=self._run, name="outlast-lifelines", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and let go of every lifeline."""
        self._stop_write.close()
        self._thread.join(2.0)

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        try:
            while self._serve_once():
                pass
        except Exception:
            # Beats still show who is alive; only the quick way is gone.
            log.exception("the connections to the agents failed; lost nodes are now noticed by missing heartbeats only")
        finally:
            for connection in (*self._held, self._listener, self._stop_read):
                connection.close()
            self._selector.close()

    def _serve_once(self) -> bool:
        next_s = min(self._suspects.values(), default=None)
        timeout_s = None if next_s is None else max(0.0, next_s - clock.now_s())
        for key, _ in self._selector.select(timeout_s):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._stop_read:
                return False
            if connection is self._listener:
                self._accept()
            else:
                self._read(connection)
        now_s = clock.now_s()
        for hello in [one for one, deadline_s in self._suspects.items() if now_s >= deadline_s]:
            del self._suspects[hello]
            self._on_death(hello.node, hello.epoch, "its agent's connection ended and did not come back")
        return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._held[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_MAX_HELLO_BYTES)
        except OSError:
            data = b""
        if data and self._held[connection] is None:
            try:
                hello = from_json(data, _LifelineHello)
            except msgspec.DecodeError:
                data = b""  # not from an agent
            else:
                self._held[connection] = hello
                self._suspects.pop(hello, None)
        if not data:
            self._selector.unregister(connection)
            connection.close()
            gone = self._held.pop(connection)
            if gone is not None and gone not in self._held.values():
                self._suspects[gone] = clock.now_s() + PATIENCE_S
