"""``outlast run``: from options to an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from outlast import clock, env, logs
from outlast.checkpoint.writer_client import WriterProcess
from outlast.config.flags import DEFAULT
from outlast.errors import ConfigError, ExitReason
from outlast.launch.agent_events import RunDirectoryLost, SignalReceived, WriterDied
from outlast.launch.membership import JobSettings, name_job
from outlast.launch.node_health import Checkups, Occasion
from outlast.launch.options import NO_TERMINATION_SIGNAL, RunOptions
from outlast.launch.probing import check_endpoints
from outlast.launch.run_owner import RunOwner
from outlast.launch.summary import summarise
from outlast.launch.verdicts import load_ladder
from outlast.runtime.addresses import is_loopback, own_address, parse_endpoints
from outlast.runtime.mailbox import Mailbox
from outlast.runtime.zygote import Zygote

if TYPE_CHECKING:
    from outlast.launch.agent import Agent

__all__ = ["launch"]

log = logging.getLogger(__name__)

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "outlast.monitor",
)
"""What a first DDP construction and a session import; a second and more without it."""


def launch(options: RunOptions) -> int:
    """Run a job's part on this node; return the exit code.

    Raises:
        ConfigError: Another job runs in the run directory, or something cannot be used.

    Blocks: until the job is over.
    """
    owner = RunOwner(options)  # before anything is read or written there
    try:
        return _launch(options, owner)
    except ConfigError:
        owner.withdraw()
        raise
    finally:
        owner.release()


def _launch(options: RunOptions, owner: RunOwner) -> int:
    started_s = clock.now_s()
    startup = _StartUp()
    remembered = load_ladder(options.run_dir, is_new_job=True)  # one that cannot be used is said before all else
    check_endpoints(parse_endpoints(options.endpoints))
    log.info("run %s on node %s: starting; run directory %s", options.run_id, options.node_name, options.run_dir)
    for note in options.notes:
        log.info("%s", note)
    job = name_job(env.environ().get("SLURM_JOB_ID"), remembered)
    env.set_default("TORCH_CPP_LOG_LEVEL", "ERROR")  # read as torch is imported: here, and in the workers' zygote
    worker_env = _worker_base_env(options)
    if options.layers.source("rank_termination_signal") != DEFAULT:
        log.warning("rank_termination_signal has no effect: %s", NO_TERMINATION_SIGNAL)
    kind, argv = _command(options)
    preload, own_preload = (PRELOAD, options.preload) if options.warm_start and kind != "exec" else ((), ())
    folder = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(argv[0]))

    def new_zygote() -> Zygote:
        return Zygote(preload=preload, own_preload=own_preload, folder=folder, env=worker_env)

    # Both import torch, at the same time: the zygote for the workers, this process for the agent.
    zygote, mailbox = new_zygote(), Mailbox[object]()
    startup.ends(zygote.kill)
    checkups, writer = _begin_checkups(options, mailbox), None
    if checkups is not None:
        startup.ends(checkups.abandon)
    try:
        writer = _start_writer(mailbox, options.node_name)
        if writer is not None:
            startup.ends(writer.kill)
        try:
            agent = _make_agent(
                options, owner, job, zygote, new_zygote, writer, checkups, mailbox, (kind, argv), worker_env
            )
        except (ValueError, OSError) as error:
            # torch's own checks of its options: --redirects, --logs-specs, --log-dir, devices that are not there.
            raise ConfigError(f"{str(error).splitlines()[0]}; see outlast run --help") from error
        _run_as_torch_knows_it(agent, options.torchrun.event_log_handler)
    finally:
        zygote.close()
        if checkups is not None:
            checkups.close()
        if writer is not None:
            writer.close()
    stop = agent.stop
    # One agent reads every node's journal for the totals; at 500 nodes the others had better not.
    totals = f" ({summarise(options.run_dir, agent.job).describe()})" if agent.is_host else ""
    logging.getLogger(logs.OUTCOME).log(
        logging.INFO if stop.exit_code in (ExitReason.FINISHED, ExitReason.PREEMPTED) else logging.ERROR,
        "job over after %.1f s%s, exit code %d: %s; journal in %s",
        clock.now_s() - started_s,
        totals,
        stop.exit_code,
        stop.reason,
        options.run_dir,
    )
    return stop.exit_code


class _StartUp:
    """Ctrl-C and SIGTERM before there is an agent: the process ends at once, and so does what it has started.

    Nothing is of value then. An interpreter would raise KeyboardInterrupt in the middle of an import and wait for
    processes that are busy importing.
    """

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def ends(self, action: Callable[[], None]) -> None:
        """Have something ended, too; it must not wait."""
        self._ends.append(action)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        for action in self._ends:
            action()
        log.warning("received %s before the training began: nothing was started", signal.Signals(number).name)
        logging.shutdown()
        os._exit(128 + number)


def _run_as_torch_knows_it(agent: Agent, event_log_handler: str) -> None:
    """Run the agent; tell torch's event log how that ended, as torchrun does."""
    from torch.distributed.elastic import events

    try:
        agent.run()
    except Exception:
        events.record(agent.get_event_failed(), event_log_handler)
        raise
    events.record(agent.get_event_succeeded(), event_log_handler)


def _start_writer(mailbox: Mailbox[object], node: str) -> WriterProcess | None:
    """Start the node's checkpoint writer, which holds what its workers save, also after their end."""

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
    """Have the node looked at while torch is imported; the agent takes what is found before it joins."""
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
    """Return how a worker is started: kind and argv, as in :class:`outlast.runtime.zygote.Spawn`."""
    args = options.torchrun
    rest = tuple(args.training_script_args)
    if args.no_python and not args.run_path:
        return "exec", (args.training_script, *rest)
    python = env.environ().get("PYTHON_EXEC", sys.executable)
    if not options.warm_start or args.numa_binding is not None or python != sys.executable:
        module = ("-m",) if args.module else ()
        return "exec", (python, "-u", *module, args.training_script, *rest)
    return ("module" if args.module else "script"), (args.training_script, *rest)


def _make_agent(
    options: RunOptions,
    owner: RunOwner,
    new_job: str,
    zygote: Zygote,
    new_zygote: Callable[[], Zygote],
    writer: WriterProcess | None,
    checkups: Checkups | None,
    mailbox: Mailbox[object],
    command: tuple[str, tuple[str, ...]],
    base_env: dict[str, str],
) -> Agent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.events.handlers import get_logging_handler
    from torch.distributed.run import determine_local_world_size
    from torch.numa.binding import AffinityMode, NumaOptions

    from outlast.launch.agent import Agent
    from outlast.launch.coordinator_client import ControlLink, CoordinatorClient, JobInProgress, LinkFailed
    from outlast.launch.coordinator_server import CoordinatorServer
    from outlast.launch.logs import make_logs_specs
    from outlast.launch.torchrun_backend import NamedRendezvous
    from outlast.launch.workers import Workers
    from outlast.policy.ladder import Limits
    from outlast.runtime.store import TCPStore

    args, ft = options.torchrun, options.fault_tolerance
    endpoints = parse_endpoints(options.endpoints)
    try:
        get_logging_handler(args.event_log_handler)
    except KeyError:  # torch would find out once the job is over
        raise ValueError(f"--event-log-handler={args.event_log_handler} is no handler; write console or null") from None

    def serve(store: TCPStore, former: JobInProgress | None) -> CoordinatorServer:
        owner.lead()
        return CoordinatorServer(
            store,
            JobSettings(
                job=former.job if former else new_job,
                num_slots=options.num_slots,
                max_nodes=options.max_nodes,
                former_host=former.host if former else None,
                min_nodes=ft.min_nodes,
                limits=Limits(
                    max_restarts=args.max_restarts,
                    max_restarts_total=options.max_restarts_total,
                    max_no_progress_cycles=ft.max_no_progress_cycles,
                    max_node_faults=ft.max_node_faults,
                ),
                join_timeout_s=options.join_timeout_s,
                is_named=options.is_named,
                node_timeout_s=ft.node_heartbeat_timeout,
            ),
            run_dir=options.run_dir,
            run_id=options.run_id,
            node=options.node_name,
            layers=options.layers,
            may_write=owner.may_write,
            on_error=lambda error: mailbox.put(LinkFailed(f"the coordinator ended: {error!r}")),
        )

    link = ControlLink(
        endpoints,
        node=options.node_name,
        deliver=mailbox.put,
        serve=serve,
        beat_interval_s=min(1.0, ft.node_heartbeat_timeout / 5),
        connect_timeout_s=options.join_timeout_s,
    )
    spec = WorkerSpec(
        role=args.role,
        local_world_size=determine_local_world_size(args.nproc_per_node),
        entrypoint=args.training_script,
        args=tuple(args.training_script_args),
        rdzv_handler=NamedRendezvous(options.run_id),
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        numa_options=None if args.numa_binding is None else NumaOptions(affinity_mode=AffinityMode(args.numa_binding)),
        virtual_local_rank=args.virtual_local_rank,
    )
    agent = Agent(
        spec,
        options=options,
        command=command,
        base_env=base_env,
        logs_specs=make_logs_specs(args, Path(options.run_dir)),
        workers=Workers(zygote, new_zygote),
        writer=writer,
        member=CoordinatorClient(
            link,
            addr=args.local_addr or own_address(endpoints[0].host),
            nproc=spec.local_world_size,
            wish=options.wish,
        ),
        checkups=checkups,
        mailbox=mailbox,
    )
    owner.on_lost = lambda why: mailbox.put(RunDirectoryLost(why))
    _install_handlers(args.signals_to_handle, lambda number: mailbox.put(SignalReceived(number)))
    return agent


def _install_handlers(names: str, deliver: Callable[[int], None]) -> None:
    for name in filter(None, (part.strip() for part in names.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None:
            log.warning("--signals-to-handle: %s is not a signal; it is ignored", name)
        else:
            signal.signal(number, lambda received, _frame: deliver(received))
