"""``outlast run``: from options to an exit code.

In this order: own the run directory, load the recovery policy's state, check the endpoints, start slow processes (the
fork server with torch, the health check, the checkpoint writer), import torch, run the agent, and log the job's end
with its totals from the journal (:mod:`outlast.launch.job_summary`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from outlast import clock, env, logs
from outlast.checkpoint.writer_client import WriterProcess
from outlast.config.sources import DEFAULT
from outlast.errors import ConfigError, ExitReason, OutlastError
from outlast.launch.agent_events import AgentStops, SignalReceived, WriterDied
from outlast.launch.checkups import Checkups, Occasion
from outlast.launch.control import JobIdentity, Occupant, WrongRun, probe
from outlast.launch.device_memory import MemoryReclaim
from outlast.launch.job_settings import START_S, JobSettings, name_job
from outlast.launch.job_summary import describe_job
from outlast.launch.metrics_endpoint import MetricsEndpoint
from outlast.launch.options import NO_TERMINATION_SIGNAL, RunOptions
from outlast.launch.protocol import Stop
from outlast.launch.rank_relay import RankRelay
from outlast.launch.recovery_state_file import load_recovery_state
from outlast.launch.run_records import RunRecords, describe_places
from outlast.policy.lease import LeaseOwner
from outlast.policy.recovery_policy import Limits
from outlast.runtime.addresses import Endpoint, address_for_peers, is_loopback, parse_endpoints
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.files import check_folder, in_time
from outlast.runtime.fork_server import ForkServer
from outlast.runtime.lease import FolderRecords, InUse, Lease
from outlast.runtime.processes import name_program, raise_descriptor_limit, start_time_s, this_process
from outlast.runtime.run_key import KeySource, find_run_key

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from outlast.launch.coordinator_client import CoordinatorClient
    from outlast.launch.node_agent import NodeAgent


log = logging.getLogger(__name__)
_RESOLVE_AGAIN_S, _RESOLVE_REMIND_S = 1.0, 10.0
"""How often unknown host names are looked up again, and how often that is logged."""
_SILENT_S = 12.0
"""How long the only endpoint's listener may be silent: the run's first agent may be stopped, or very busy."""

PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo", "outlast.monitor")
"""Imported by a first DDP construction and a session; saves over a second in each worker."""


_TOTALS_S = 20.0
_ORDERLY = (ExitReason.FINISHED, ExitReason.PREEMPTED)


def launch(options: RunOptions) -> int:
    """Run a job's part on this node; return the exit code.

    Raises:
        ConfigError: Another job runs in the run directory, or an option cannot be used.

    Blocks: until the job is over.
    """
    mailbox = Mailbox[object]()
    lease = own_run_directory(options, mailbox)  # before any other access to the directory
    try:
        metrics = None
        with ExitStack() as stack:
            if options.metrics is not None:
                metrics = MetricsEndpoint(
                    options.metrics, run_id=options.run_id, node=options.node_name, run_dir=options.run_dir
                )
                stack.callback(metrics.close)
            exit_code = _launch(options, lease, mailbox, metrics)
            is_requested = exit_code == ExitReason.PREEMPTED or exit_code > 128
            if metrics is not None and not is_requested:  # a scheduler that requests a shutdown kills slow processes
                metrics.await_scrape(options.torchrun.metrics_linger)
            return exit_code
    except ConfigError:
        lease.withdraw()  # the job was refused before it began
        raise
    finally:
        lease.release()


def _launch(options: RunOptions, lease: Lease, mailbox: Mailbox[object], metrics: MetricsEndpoint | None) -> int:
    started_s = clock.now_s()
    startup = _StartUp()
    raise_descriptor_limit()  # all processes of the node inherit the limit
    remembered = load_recovery_state(options.run_dir)  # an unusable file is refused before anything else
    identity = _identify(options)
    records = RunRecords(options.run_dir, lease.owner, last_job=remembered.job)
    endpoints = records.find_endpoints(parse_endpoints(options.endpoints))
    listed = parse_endpoints(options.endpoints)
    _check_endpoints(listed, identity, options.resolve_timeout_s, has_more=not set(endpoints) <= set(listed))
    if identity.key.source is KeySource.RUN_ID:
        log.warning(
            "the run key is derived from the run's id: that keeps other runs out, not attackers; give all agents the "
            "same --run-key-file or OUTLAST_RUN_KEY"
        )
    log.info("run %s on node %s: starting; run directory %s", options.run_id, options.node_name, options.run_dir)
    for note in options.notes:
        log.info("%s", note)
    job = name_job(env.environ().get("SLURM_JOB_ID"), remembered)
    given = {env.INTERFACE: options.torchrun.interface, env.PORT_RANGE: options.torchrun.port_range}
    env.update({name: value for name, value in given.items() if value})  # for this agent, its writer and its workers
    env.set_default("TORCH_CPP_LOG_LEVEL", "ERROR")  # read at the import of torch, here and in the fork server
    base_env = _worker_base_env(options)
    base_env[env.RUN_KEY] = identity.key.as_variable()
    base_env[env.AGENT_STARTED] = str(start_time_s(os.getpid()))
    for name in ("rank_termination_signal", "rank_termination_grace"):
        if options.layers.source(name) != DEFAULT:
            log.warning("%s has no effect: %s", name, NO_TERMINATION_SIGNAL)
    kind, argv = _command(options)
    preload, own_preload = (PRELOAD, options.preload) if kind != "exec" else ((), ())
    folder = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(argv[0]))
    new_fork_server = partial(ForkServer, preload=preload, own_preload=own_preload, folder=folder, env=base_env)
    with ExitStack() as stack:
        # The fork server and this process import torch at the same time.
        fork_server = new_fork_server()
        stack.callback(fork_server.close)
        startup.actions.append(fork_server.kill)
        if (checkups := _begin_checkups(options, mailbox)) is not None:
            stack.callback(checkups.close)
            startup.actions.append(checkups.abandon)
        memory = MemoryReclaim(options.fault_tolerance, mailbox.put)
        stack.callback(memory.close)
        startup.actions.append(memory.abandon)
        if (writer := _start_writer(mailbox, options.node_name)) is not None:
            stack.callback(writer.close)
            startup.actions.append(writer.kill)
        try:
            from outlast.launch.cycle import WorkerLaunch
            from outlast.launch.node_agent import NodeAgent
            from outlast.launch.worker_logs import make_logs_specs
            from outlast.launch.workers import NodeWorkers

            spec, logs_specs = _worker_spec(options), make_logs_specs(options.torchrun, options.run_dir)
            agent = NodeAgent(
                WorkerLaunch(options=options, kind=kind, argv=argv, env=base_env, spec=spec, logs=logs_specs),
                workers=NodeWorkers(fork_server, new_fork_server),
                writer=writer,
                client=_make_client(
                    options,
                    identity,
                    lease,
                    mailbox,
                    endpoints=endpoints,
                    records=records,
                    new_job=job,
                    last_job=remembered.job,
                    nproc=spec.local_world_size,
                ),
                checkups=checkups,
                memory=memory,
                mailbox=mailbox,
                began_s=started_s,
            )
        except (ValueError, OSError) as error:
            # torch's own checks of its options: --redirects, --logs-specs, --log-dir, missing devices.
            raise ConfigError(f"{str(error).splitlines()[0]}; see outlast run --help") from error
        if metrics is not None:
            metrics.show(agent.outlook)
        startup.is_over = True
        _install_handlers(options.torchrun.signals_to_handle, lambda number: mailbox.put(SignalReceived(number)))
        _run_with_torch_events(agent, options.torchrun.event_log_handler)
    stop = agent.stop
    # Only one agent reads all nodes' journals: 500 at once would overload the file system.
    totals = _describe_totals(options, agent.job) if agent.is_host and not agent.has_left else ""
    logging.getLogger(logs.OUTCOME).log(
        logging.INFO if agent.has_left or stop.exit_code in _ORDERLY else logging.ERROR,
        "%s after %.1f s%s, exit code %d: %s; journal in %s",
        f"node {options.node_name} has left the job" if agent.has_left else "job over",
        clock.now_s() - started_s,
        totals,
        stop.exit_code,
        stop.reason,
        options.run_dir,
    )
    return stop.exit_code


def _describe_totals(options: RunOptions, job: str) -> str:
    try:
        return f" ({in_time(options.run_dir, partial(describe_job, options.run_dir, job), _TOTALS_S)})"
    except (OutlastError, OSError) as error:  # removed meanwhile, or a disk that hangs
        log.warning("the journals in %s cannot be read: %s", options.run_dir, error)
        return ""


class _StartUp:
    """Ctrl-C and SIGTERM before the agent runs: end this process and those that it has started at once.

    KeyboardInterrupt would be raised in the middle of an import, and would wait for processes that are busy importing.
    Later the handler still serves those of the two signals that ``--signals-to-handle`` does not name.
    """

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []
        """End the started processes; none of them blocks."""
        self.is_over = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        for action in self.actions:
            action()
        why = (
            "--signals-to-handle does not name it, so the job ends at once and saves nothing"
            if self.is_over
            else "nothing was started"
        )
        when = "" if self.is_over else " before the training began"
        log.warning("received %s%s: %s", signal.Signals(number).name, when, why)
        logging.shutdown()
        os._exit(128 + number)


def _identify(options: RunOptions) -> JobIdentity:
    """Return what all agents of the job have in common.

    Raises:
        ConfigError: The run key cannot be read or made.
    """
    endpoints = parse_endpoints(options.endpoints)
    is_one_machine = options.max_nodes == 1 or all(is_loopback(one.host) for one in endpoints)
    key = find_run_key(
        options.run_id, options.run_dir, key_file=options.torchrun.run_key_file, is_one_machine=is_one_machine
    )
    identity = JobIdentity(run_id=options.run_id, key=key, run_dir=options.run_dir)
    if options.any_command:
        return identity
    kind, argv = _command(options)
    text = " ".join(argv if kind != "exec" else argv[-1 - len(options.torchrun.training_script_args) :])
    digest = hashlib.sha256("\0".join([kind, *argv[1:]]).encode(errors="surrogateescape")).hexdigest()
    return replace(identity, command=digest, command_text=text if len(text) < 200 else f"{text[:197]}...")


def _check_endpoints(
    endpoints: Sequence[Endpoint], identity: JobIdentity, resolve_timeout_s: float, *, has_more: bool
) -> None:
    """Reject endpoints that lead nowhere; an agent would wait there in silence until ``join_timeout``.

    Args:
        endpoints: Where the agents meet.
        identity: The run, as its coordinator must know it.
        resolve_timeout_s: How long all hosts may be unknown: in Kubernetes a name exists once its pod has started.
        has_more: The run directory lists further endpoints, so that one that leads nowhere does not matter.

    Raises:
        ConfigError: No host is known, or another program or run listens at an endpoint.

    Blocks: about 0.01 s where all is well or nothing listens yet; seconds where names or hosts do not respond;
    :data:`_SILENT_S` where the only endpoint's listener is silent; up to ``resolve_timeout_s`` more where no host is
    known.
    """
    until_s, logged_s = clock.now_s() + resolve_timeout_s, clock.now_s()
    while unknown := _find_unknown(endpoints, identity, has_more=has_more):
        left_s = until_s - clock.now_s()
        if left_s <= 0:
            raise ConfigError(f"--rdzv-endpoint: no such host: {', '.join(unknown)}; check the name")
        if clock.now_s() - logged_s >= _RESOLVE_REMIND_S:
            logged_s = clock.now_s()
            log.info("waiting for the name of a host: %s; gives up in %.0f s", ", ".join(unknown), left_s)
        threading.Event().wait(min(_RESOLVE_AGAIN_S, left_s))


def _find_unknown(endpoints: Sequence[Endpoint], identity: JobIdentity, *, has_more: bool) -> list[str]:
    """Return the unknown hosts with reasons, if all hosts are unknown.

    Raises:
        ConfigError: Another program or run listens at an endpoint.
    """
    unknown = []
    is_only = len(endpoints) == 1 and not has_more
    for endpoint in endpoints:
        if endpoint.port == 0:  # a free port is chosen later
            continue
        try:
            found, why = probe(endpoint, identity.run_id, identity.key)
            until_s = clock.now_s() + _SILENT_S
            while found is Occupant.SILENT and is_only and clock.now_s() < until_s:
                found, why = probe(endpoint, identity.run_id, identity.key)
        except WrongRun as error:
            raise ConfigError(f"--rdzv-endpoint={endpoint}: a coordinator listens there, and {error}") from None
        if found is Occupant.UNKNOWN:
            unknown.append(f"{endpoint.host!r} ({why})")
        elif found is Occupant.FOREIGN or (found is Occupant.SILENT and is_only):
            raise ConfigError(
                f"--rdzv-endpoint={endpoint}: {found.value}, not an agent of a run; give a free port, or stop it"
            )
    return unknown if len(unknown) == len(endpoints) and not has_more else []


def _run_with_torch_events(agent: NodeAgent, event_log_handler: str) -> None:
    """Run the agent; record its end in torch's event log, as torchrun does."""
    from torch.distributed.elastic import events

    try:
        agent.run()
    except Exception:
        events.record(agent.get_event_failed(), event_log_handler)
        raise
    events.record(agent.get_event_succeeded(), event_log_handler)


def _start_writer(mailbox: Mailbox[object], node: str) -> WriterProcess | None:
    """Start the node's checkpoint writer, whose memory outlives the workers."""

    def on_death(summary: str) -> None:
        mailbox.put(WriterDied(summary))

    try:
        return WriterProcess(node=node, on_death=on_death)
    except OSError as error:
        log.warning(
            "the checkpoint writer cannot be started (%s): what is in memory does not outlive the workers", error
        )
        return None


def _begin_checkups(options: RunOptions, mailbox: Mailbox[object]) -> Checkups | None:
    """Begin to check the node while torch is imported; the agent takes the result before it joins."""
    config = options.health
    if config is None:
        return None
    needs_network = any(not is_loopback(one.host) for one in parse_endpoints(options.endpoints))
    checkups = Checkups(
        config, places=options.health_places, node=options.node_name, network=needs_network, deliver=mailbox.put
    )
    if config.before_joining:
        checkups.begin(Occasion.JOINING, gpus=config.gpus)
    return checkups


def _worker_base_env(options: RunOptions) -> dict[str, str]:
    values = env.environ()
    nproc = options.torchrun.nproc_per_node
    if "OMP_NUM_THREADS" not in values and nproc != "1":
        log.info("OMP_NUM_THREADS is not set: each worker gets 1 thread, as with torchrun")
        values["OMP_NUM_THREADS"] = "1"
    return values


def _command(options: RunOptions) -> tuple[str, tuple[str, ...]]:
    """Return how a worker is started: kind and argv, as in :class:`outlast.runtime.fork_server.Spawn`."""
    args = options.torchrun
    rest = tuple(args.training_script_args)
    if args.no_python and not args.run_path:
        return "exec", (args.training_script, *rest)
    python = env.environ().get("PYTHON_EXEC", sys.executable)
    if args.no_warm_start or args.numa_binding is not None or python != sys.executable:
        module = ("-m",) if args.module else ()
        return "exec", (python, "-u", *module, args.training_script, *rest)
    return ("module" if args.module else "script"), (args.training_script, *rest)


def _worker_spec(options: RunOptions) -> WorkerSpec:
    """Return torch's description of the workers.

    Raises:
        ValueError, OSError: An option cannot be used.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.events.handlers import get_logging_handler
    from torch.distributed.run import determine_local_world_size

    args = options.torchrun
    try:
        get_logging_handler(args.event_log_handler)
    except KeyError:  # torch would detect it at the job's end
        raise ValueError(
            f"--event-log-handler={args.event_log_handler} is not an event handler of torch; write console or null"
        ) from None
    # torch's event log queries these of a rendezvous handler; the agents meet through the coordinator.
    names = SimpleNamespace(get_backend=lambda: "outlast", get_run_id=lambda: options.run_id)
    newer: dict[str, Any] = {"virtual_local_rank": True} if args.virtual_local_rank else {}  # not a field in torch 2.8
    return WorkerSpec(
        role=args.role,
        local_world_size=determine_local_world_size(args.nproc_per_node),
        entrypoint=args.training_script,
        args=tuple(args.training_script_args),
        rdzv_handler=names,  # type: ignore[arg-type]
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        **newer,
    )


def _make_client(
    options: RunOptions,
    identity: JobIdentity,
    lease: Lease,
    mailbox: Mailbox[object],
    *,
    endpoints: Sequence[Endpoint],
    records: RunRecords,
    new_job: str,
    last_job: str,
    nproc: int,
) -> CoordinatorClient:
    """Return the connection to the coordinator, not started; it hosts the coordinator if no other agent does.

    Args:
        options: The launcher's options.
        identity: What all agents of the job have in common.
        lease: Lease of the run directory.
        mailbox: The agent's mailbox.
        endpoints: Where the coordinator may be.
        records: Records of the run directory.
        new_job: Name of the job, if none is in progress.
        last_job: The run's last job when this agent began.
        nproc: Workers of this node.
    """
    from outlast.launch.control_link import ControlLink
    from outlast.launch.coordinator_client import CoordinatorClient

    args, ft = options.torchrun, options.fault_tolerance
    settings = JobSettings(
        job=new_job,
        num_slots=options.num_slots,
        max_nodes=options.max_nodes,
        min_nodes=ft.min_nodes,
        limits=Limits(
            max_restarts=args.max_restarts,
            max_restarts_total=args.max_restarts_total,
            max_no_progress_cycles=ft.max_no_progress_cycles,
            max_node_faults=ft.max_node_faults,
            max_restart_delay_s=ft.max_restart_delay,
        ),
        join_timeout_s=options.join_timeout_s,
        is_named=options.is_named,
        node_timeout_s=ft.node_heartbeat_timeout,
        heartbeat_interval_s=min(1.0, ft.node_heartbeat_timeout / 5),
        start_timeout_s=START_S + ft.gpu_memory_reclaim_timeout,
        host=options.node_name,
        last_job=last_job,
    )

    def lead() -> None:
        try:
            lease.acquire(leads=True)
        except OSError as error:  # the endpoint has one coordinator, whatever the run directory contains
            log.warning(
                "the record of this run in %s cannot be written (%s); this node hosts the coordinator without it: make "
                "room there, and start no other run in that directory",
                *(options.run_dir, error),
            )

    link = ControlLink(
        endpoints,
        settings,
        identity,
        deliver=mailbox.put,
        layers=options.layers,
        on_host=lead,
        may_write=partial(may_write, lease),
        relay=RankRelay(),
        records=records,
    )
    addr = args.local_addr or address_for_peers(endpoints, is_one_machine=options.max_nodes == 1)
    return CoordinatorClient(link, addr=addr, nproc=nproc, wish=options.wish)


def _install_handlers(names: str, deliver: Callable[[int], None]) -> None:
    for name in filter(None, (part.strip() for part in names.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None:
            log.warning("--signals-to-handle: %s is not a signal; it is ignored", name)
        else:
            signal.signal(number, lambda received, _frame: deliver(received))


def own_run_directory(options: RunOptions, mailbox: Mailbox[object]) -> Lease:
    """Acquire the run directory's lease before any other part of the job begins.

    Agents of one job have the same id and a common endpoint. The first of them acquires the lease, and the others share
    it; the agent that hosts the coordinator leads and renews it. An agent with a node-local run directory leads its
    own.

    Args:
        options: The launcher's options.
        mailbox: Receives :class:`AgentStops` if another job takes over the directory.

    Raises:
        ConfigError: Another job runs in the directory, or a link or file is in place of a folder.

    Blocks: 10 s if only time can show whether a job on another machine still runs.
    """

    def on_lost(lost: InUse) -> None:
        reason = f"run directory {lost}; this job writes nothing more there; end one of the two"
        mailbox.put(AgentStops(Stop(exit_code=ExitReason.NO_PROGRESS, reason=reason)))

    try:
        for name in ("journal", "failures", "stacks", "diagnoses"):
            check_folder(options.run_dir / name)
    except NotADirectoryError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}, or name another --run-dir") from None
    lease = Lease(FolderRecords(options.run_dir), _describe_owner(options), on_lost=on_lost)
    try:
        lease.acquire()
    except InUse as error:
        raise ConfigError(
            f"run directory {error}; wait until that job has ended, or name another directory (--run-dir)"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--run-dir={options.run_dir} cannot be taken ({error.strerror or error}); name one that is writable"
        ) from None
    return lease


def may_write(lease: Lease) -> bool:
    """Return whether this job still owns the run directory, before state for its next job is written."""
    try:
        lease.check()
    except InUse as error:
        log.debug("what the run has learned is not written: %s", error)
        return False
    except OSError as error:  # the write will report it
        log.debug("the run directory does not respond: %s", error)
    return True


def _describe_owner(options: RunOptions) -> LeaseOwner:
    """Return the record that identifies this agent's job."""
    values, places = env.environ(), describe_places(parse_endpoints(options.endpoints))
    requeues = values.get("SLURM_RESTART_COUNT", "")
    has_nodes = bool(places)  # other agents may connect to them
    return LeaseOwner(
        token="",
        process=this_process(),
        run=options.run_id,
        names=options.names,
        script=name_program(options.torchrun.training_script),
        job=options.run_id if has_nodes else None,
        meets_at=places,
        allocation=values.get("SLURM_JOB_ID") or None,
        requeues=int(requeues) if requeues.isdigit() else 0,
        outlives=options.max_nodes > 1,
        shares=has_nodes,
    )
