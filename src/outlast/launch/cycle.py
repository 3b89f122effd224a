"""One cycle on one node: its workers, their board, watchdog and logs."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerSpec

from outlast import clock, env
from outlast.config.flags import SCRIPT, LayeredSettings
from outlast.errors import ConfigError, ExitReason
from outlast.incidents import Cause, Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.in_process import InProcess, Mended
from outlast.launch.logs import CycleLogs
from outlast.launch.options import NO_TERMINATION_SIGNAL, RunOptions
from outlast.launch.worker_process import WorkerProcess
from outlast.monitor.examine import examine
from outlast.monitor.learned import LearnedTimeouts, observe
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.causes import OWN_VERDICTS, PLAIN_START_S, Ended, Position, find_first, permanent_cause, wait_s
from outlast.policy.deadlines import FIELD_OF_SETTING, Timeouts
from outlast.policy.inprocess_protocol import InProcessState
from outlast.policy.protection import describe_hangs
from outlast.policy.quarantine import Load, tier_of_load
from outlast.policy.rerun import Diagnosis
from outlast.runtime.board import Board, RankState
from outlast.runtime.diagnoses import read_diagnosis
from outlast.runtime.postmortem import Postmortem
from outlast.runtime.zygote import Exited, Spawn

__all__ = ["ALONE_S", "Cycle"]

log = logging.getLogger(__name__)
_FATAL_SIGNALS = {
    "Segmentation fault": -signal.SIGSEGV,
    "Aborted": -signal.SIGABRT,
    "Bus error": -signal.SIGBUS,
    "Floating-point exception": -signal.SIGFPE,
    "Floating point exception": -signal.SIGFPE,
    "Illegal instruction": -signal.SIGILL,
}
"""What ``faulthandler`` calls the signals that it catches."""
_LAST_LINES = 20
_MAX_LINE = 300
_MAX_TAIL = 16 * 1024
ALONE_S = 5.0
"""What workers that were told to leave have left when one of them ended without having saved."""
_WITHOUT_EFFECT = {
    "node_heartbeat_timeout": "agents need it before the script runs; give outlast run --ft-node-heartbeat-timeout, or "
    "--config with a file that has it",
    "rank_termination_signal": NO_TERMINATION_SIGNAL,
}


@dataclass(slots=True)
class Cycle:
    """The workers of one cycle on this node.

    Thread: the agent's main thread; the watchdog reports through ``on_hang``.
    """

    start: m.Start
    spec: WorkerSpec
    options: RunOptions
    job: str
    node: str
    board: Board
    logs: CycleLogs
    workers: dict[int, WorkerProcess]
    """Key in the zygote's messages to worker."""
    spawns: list[Spawn]
    in_process: InProcess
    """How the workers stand with restarts inside their processes."""
    postmortem: Postmortem
    """What the workers record of their ends."""
    watchdog: Watchdog | None = None
    layers: LayeredSettings = field(init=False)
    """The fault tolerance settings in force: those of the launcher, and of the script once it told them."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """What is enforced."""
    _origins: dict[str, str] = field(default_factory=dict)
    """Where each setting of it comes from."""
    script_settings: str | None = None
    """What the script's config sets, as text; ``None`` while no rank has attached to the board."""
    _strangers: set[int] = field(default_factory=set)
    """Local ranks whose scripts set something else than the first one's."""
    over: bool = False
    """Nothing that happens in it counts any more."""

    def __post_init__(self) -> None:
        self.layers = self.options.layers

    @property
    def number(self) -> int:
        """The cycle's number."""
        return self.start.cycle

    def watch(self, on_hang: Callable[[HangReport], None], on_error: Callable[[BaseException], None]) -> None:
        """Watch the workers, now that they were told to start, and copy their output."""
        self.logs.start()
        if self.layers.config.enable_ft_package:
            self.watchdog = Watchdog(self.board, None, node=self.node, on_hang=on_hang, on_error=on_error)
            self.watchdog.start()

    def settle(self) -> None:
        """Enforce the timeouts that are in force, once a rank has attached to the board and told what its config sets.

        The first rank's settings count; another rank that has others is told so.
        """
        for local_rank in range(self.board.num_ranks):
            text = self.board.settings(local_rank)
            if text is None or text == self.script_settings:
                continue
            if self.script_settings is None:
                self.script_settings = text
                self._enforce(text)
            elif local_rank not in self._strangers:
                self._strangers.add(local_rank)
                log.warning(
                    "the fault tolerance settings of local rank %d differ from another rank's, which are in "
                    "force; give all ranks the same config",
                    local_rank,
                )

    def _enforce(self, text: str) -> None:
        try:
            self.layers = self.layers.with_script(text or "{}")
        except ConfigError as error:
            log.warning("the fault tolerance settings of the script's config are not used: %s", error)
        config, source = self.layers.config, self.layers.source
        for name, why in _WITHOUT_EFFECT.items():
            if source(name) == SCRIPT:
                log.warning("fault_tolerance.%s of the script's config has no effect: %s", name, why)
        if self.watchdog is None:
            return
        if not config.enable_ft_package:
            self.watchdog.stop()
            self.watchdog = None
            return
        timeouts = configured = Timeouts.from_config(config, with_defaults=True)
        if config.calc_ft_timeouts:
            timeouts = LearnedTimeouts.load(self.options.run_dir).apply_to(configured)

        def origin(name: str) -> str:
            field = FIELD_OF_SETTING[name]
            return "learned" if getattr(timeouts, field) != getattr(configured, field) else source(name)

        self.timeouts, self._origins = timeouts, {name: origin(name) for name in FIELD_OF_SETTING}
        self.watchdog.enforce(timeouts, timeouts.describe(origin))

    @property
    def is_plain(self) -> bool:
        """Whether hangs would be noticed, but no worker of this node has anything yet that shows them."""
        return self.watchdog is not None and not self.had_session

    @property
    def had_session(self) -> bool:
        """Whether a worker of this node has, or had, a session or a monitor: it has written on the board."""
        return any(state.attached or state.in_process != InProcessState.OFF for state in self.board.read_all())

    def describe_hang_detection(self) -> str:
        """Return what notices hangs, for people."""
        return describe_hangs(
            self.timeouts if self.watchdog is not None else None,
            self.layers.source("enable_ft_package"),
            has_session=not self.is_plain,
            origins=self._origins,
        )

    @property
    def session_protection(self) -> str:
        """What the session of this node's first rank protects against; empty while none has told."""
        return "" if self.over else self.board.protection(0)

    def look(self) -> None:
        """Have the workers judged afresh: something about them changed."""
        if self.watchdog is not None:
            self.watchdog.look()

    def note_exit(self, news: Exited) -> WorkerProcess | None:
        """Note that a worker ended; ``None`` when it is none of this cycle's."""
        worker = self.workers.get(news.key)
        if worker is not None:
            worker.exit_code, worker.ended_ns = news.exit_code, news.mono_ns
        return worker

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit codes by local rank; ``None`` while a worker runs."""
        return [worker.exit_code for worker in self.workers.values()]

    @property
    def all_ended(self) -> bool:
        """Whether every worker ended."""
        return None not in self.exit_codes

    @property
    def can_be_resumed(self) -> bool:
        """Whether there is a generation to go on from.

        The workers say so as they leave, all that were needed in order; of those that were killed the board knows.
        """
        if self.durable_iteration is not None:
            return True
        codes = {worker.exit_code for worker in self.workers.values() if worker.lost is None}
        return ExitReason.PREEMPTED in codes and codes <= {ExitReason.PREEMPTED, ExitReason.FINISHED}

    @property
    def has_started(self) -> bool:
        """Whether a worker runs, or ran."""
        return any(worker.pid for worker in self.workers.values())

    @property
    def lacks_a_rank(self) -> bool:
        """Whether a worker ended without having saved, so that the others cannot save together any more."""
        orderly = (None, ExitReason.FINISHED, ExitReason.PREEMPTED)
        return any(worker.lost is None and worker.exit_code not in orderly for worker in self.workers.values())

    def goes_on_without(self, worker: WorkerProcess) -> bool:
        """Return whether the others go on without a worker that ended with anything but 0, inside their processes."""
        assert worker.exit_code
        return self.in_process.lose(worker, self._describe_exit(worker, worker.exit_code))

    def has_lost(self, rank: int | None) -> bool:
        """Return whether a rank ended, and the others go on without it."""
        return any(worker.lost is not None for worker in self.workers.values() if worker.global_rank == rank)

    def describe_mended(self, mended: Mended) -> Incident:
        """Return the incident after which the workers restarted inside their processes."""
        return self.in_process.incident_of(mended, job=self.job, cycle=self.number, node=self.node)

    def describe_unfinished(self) -> Incident | None:
        """Return why nothing was finished on this node, all its workers having ended; ``None`` = it was."""
        return self.in_process.unfinished(job=self.job, cycle=self.number, node=self.node)

    @property
    def wait_for_others_s(self) -> float:
        """Seconds to wait for other workers of this node before a failure is reported; 0 = what happened is clear."""
        failing = self._failing()
        done = (ExitReason.FINISHED, ExitReason.PREEMPTED)
        num_ended = sum(worker.lost is not None or worker.exit_code in done for worker in self.workers.values())
        return wait_s(
            failing,
            num_running=len(self.workers) - len(failing) - num_ended,
            is_before_first_step=self._is_before_first_step,
            has_session=self.had_session,
            is_alone=self.start.num_nodes == 1,
        )

    def describe_failure(self) -> Incident:
        """Return the incident of the worker that failed first, one or more having ended with anything but 0.

        One that judged a result invalid is the cause, also where a peer that missed it was gone before it.
        """
        if (other := self._describe_verdict() or self.in_process.unmended) is not None:
            return other
        failing = self._failing()
        first = find_first(failing).rank
        for worker in self.workers.values():
            if worker.global_rank != first and any(worker.global_rank == one.rank for one in failing):
                self._keep_postmortem(worker)
        worker = next(worker for worker in self.workers.values() if worker.global_rank == first)
        if (code := worker.exit_code) is None:  # it is about to end
            cause = self.postmortem.read(worker.local_rank).cause
            code = self.board.read(worker.local_rank).leaving_with or 1  # a session says with which
            if cause is not None and cause.type == "fatal signal":
                code = _FATAL_SIGNALS.get(cause.text, 1)
        return self._describe_exit(worker, code)

    def _failing(self) -> list[Ended]:
        """Return the workers that ended with anything but 0, and those that recorded why they are about to."""
        failing = []
        for worker in self.workers.values():
            if worker.lost is not None or worker.exit_code in (ExitReason.FINISHED, ExitReason.PREEMPTED):
                continue
            cause = self.postmortem.read(worker.local_rank).cause
            if worker.exit_code is not None or cause is not None:
                failing.append(Ended(rank=worker.global_rank, cause=cause, ended_ns=worker.ended_ns))
        return failing

    @property
    def _is_before_first_step(self) -> bool:
        """Whether no rank of this node began a step in this job, as far as its ranks tell."""
        if self.number:
            return False
        states = self.board.read_all()
        if self.had_session:
            sections = {section.name for state in states for section in state.sections}
            closed = {name for state in states for name in state.counts}
            return "step" not in sections | closed and not any(state.num_heartbeats for state in states)
        started_ns = min((worker.started_ns for worker in self.workers.values() if worker.started_ns), default=0)
        return clock.now_ns() - started_ns < PLAIN_START_S * 1e9

    @property
    def _permanent_cause(self) -> Cause | None:
        """What all workers of this node failed with alike, if a restart cannot mend it; some may still be ending."""
        if not self._is_before_first_step:
            return None
        causes = [self.postmortem.read(worker.local_rank).cause for worker in self.workers.values()]
        return permanent_cause(causes, has_session=self.had_session)

    def _describe_verdict(self) -> Incident | None:
        """Return the incident of a worker that leaves, or left, for an invalid result or a slow rank; ``None`` = none.

        Where all ranks leave together it is that of the rank that saw the result, or is slow, if it is on this node.
        """
        first: tuple[WorkerProcess, int, Diagnosis | None] | None = None
        for worker in self.workers.values():
            code = worker.exit_code or self.board.read(worker.local_rank).leaving_with
            if code not in OWN_VERDICTS:
                continue
            diagnosis = read_diagnosis(self.options.run_dir, self.job, self.number, worker.global_rank)
            if diagnosis is not None and diagnosis.rank == worker.global_rank:
                return self._describe_exit(worker, code, diagnosis)
            if first is None or (first[2] is None and diagnosis is not None):
                first = worker, code, diagnosis
        if first is None:
            return None
        worker, code, diagnosis = first
        seers = [other for other in self.workers.values() if diagnosis and diagnosis.rank == other.global_rank]
        return self._describe_exit(seers[0] if seers else worker, code, diagnosis)

    def _describe_exit(self, worker: WorkerProcess, exit_code: int, diagnosis: Diagnosis | None = None) -> Incident:
        state = self.board.read(worker.local_rank)
        evidence = self._keep_postmortem(worker)
        iteration = state.iteration if state.attached else None
        if diagnosis is not None:
            evidence.pop("cause", None)  # an exit on purpose, of which the diagnosis says all
            evidence |= {"summary": diagnosis.describe(), "diagnosis": msgspec.to_builtins(diagnosis)}
            iteration = diagnosis.iteration
        return Incident(
            kind=IncidentKind.WORKER_DIED if exit_code < 0 else IncidentKind.WORKER_FAILED,
            job=self.job,
            cycle=self.number,
            node=self.node,
            rank=worker.global_rank,
            pid=worker.pid,
            section="/".join(section.name for section in state.sections) or None,
            iteration=iteration,
            exit_code=exit_code,
            evidence=evidence,
        )

    def _keep_postmortem(self, worker: WorkerProcess) -> dict[str, Any]:
        """Write down what a worker left, and return what an incident holds of it."""
        remains = self.postmortem.read(worker.local_rank)
        cause, output = remains.cause, remains.output or self._redirected_output(worker.local_rank)
        last = next((line.strip() for line in reversed(output) if line.strip()), "")
        if cause is not None and cause.type == "SystemExit" and not cause.text:
            text = last[:_MAX_LINE] if cause.is_usage_error else f"the last output was {last[:_MAX_LINE]!r}"
            cause = msgspec.structs.replace(cause, text=text if last else "")
        evidence: dict[str, Any] = {}
        if cause is not None:
            evidence["cause"] = msgspec.to_builtins(cause)
        elif text := self._read_error(worker.local_rank):
            evidence["summary"] = text
        elif last and (worker.exit_code or 0) > 0:
            evidence["summary"] = f"the last output was {last[:_MAX_LINE]!r}"
        if output:
            evidence["output"] = [line[:_MAX_LINE] for line in output[-_LAST_LINES:]]
        if cause is not None or output:
            folder = self.options.run_dir / "failures" / f"{env.clean_name(self.job)}-cycle-{self.number}"
            path = folder / f"rank-{worker.global_rank}.txt"
            head = f"rank {worker.global_rank} (node {self.node}, pid {worker.pid}), exit code {worker.exit_code}"
            parts = [head, remains.trace, remains.fault, "last output:", "\n".join(output)]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text("\n\n".join(filter(None, parts)) + "\n", errors="replace")
                evidence["file"] = str(path)
            except OSError as error:  # a full disk may be what ended the worker
                log.warning("%s cannot be written: %s", path, error)
        return evidence

    def _redirected_output(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker's log files, stderr's last; empty where its output was not redirected."""
        destinations, lines = self.logs.destinations, list[str]()
        for path in dict.fromkeys((destinations.stdouts.get(local_rank), destinations.stderrs.get(local_rank))):
            try:
                with open(path or os.devnull, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_TAIL))
                    lines += file.read(_MAX_TAIL).decode(errors="replace").splitlines()[-_LAST_LINES:]
            except OSError as error:
                log.debug("%s cannot be read: %s", path, error)
        return tuple(lines)

    def describe_hang(self, report: HangReport) -> Incident:
        """Return the incident of the first rank that exceeded a timeout; the culprit is found later."""
        first = report.expired[0]
        state = self.board.read(first.local_rank)
        return Incident(
            kind=IncidentKind.WORKER_HUNG,
            job=self.job,
            cycle=self.number,
            node=self.node,
            rank=state.global_rank,
            pid=state.pid,
            section="/".join(section.name for section in state.sections) or None,
            iteration=state.iteration,
            detected_after_s=round(first.elapsed_s, 4),
            evidence={"summary": first.describe(self.node), "timeout_s": first.timeout_s},
        )

    def examine(self, report: HangReport | None) -> tuple[Position, ...]:
        """Look where the ranks are that take part, and dump their stacks; workers that were lost do not.

        Blocks: up to about two seconds.
        """
        positions = examine(
            self.board,
            node=self.node,
            stacks_dir=self.options.run_dir / "stacks" / f"cycle-{self.number}",
            expired=report.expired if report else (),
        )
        lost = {worker.pid for worker in self.workers.values() if worker.lost is not None}
        return tuple(one for one in positions if one.pid not in lost)

    def facts(self, incident: Incident | None, positions: tuple[Position, ...] = ()) -> m.CycleFacts:
        """Return what this node knows of the cycle."""
        states = [state for state in self.board.read_all() if state.attached]
        return m.CycleFacts(
            cycle=self.number,
            incident=incident if incident is not None else self._describe_verdict(),
            load=self._load(states),
            durable_iteration=self.durable_iteration,
            progress_known=self.progress_known,
            had_session=self.had_session,
            positions=positions,
            observation=observe(states) if states else None,
            permanent=self._permanent_cause,
        )

    @property
    def durable_iteration(self) -> int | None:
        """Highest iteration that a worker of this node knows to be saved for good; ``None`` = none yet."""
        durable = [s.durable_iteration for s in self.board.read_all() if s.attached and s.durable_iteration is not None]
        return max(durable, default=None)

    @property
    def progress_known(self) -> bool:
        """Whether a worker of this node reports its saves."""
        return any(state.attached and state.reports_progress for state in self.board.read_all())

    def _load(self, states: list[RankState]) -> Load | None:
        loaded = [state.loaded for state in states if state.loaded is not None]
        if not loaded:
            return None
        return Load(
            cycle=f"{env.clean_name(self.job)}-{self.number}",
            generation=loaded[0].generation,
            attempt=loaded[0].attempt,
            tier=tier_of_load([str(one.tier) for one in loaded]),
            suspect_window=loaded[0].suspect_window,
        )

    def iterations(self) -> dict[str, int]:
        """Return the last iteration of every rank that told one."""
        return {str(s.global_rank): s.iteration for s in self.board.read_all() if s.attached}

    def close(self, *, wait_for_logs: bool = False) -> None:
        """Stop watching, free the board and end the log tails; the workers are the zygote's to end."""
        self.over = True
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
        self.logs.stop(wait=wait_for_logs)
        self.in_process.close()
        self.postmortem.close()
        self.board.close()

    def _read_error(self, local_rank: int) -> str:
        """Return the message in torch's error file, if the script is decorated with ``@record``."""
        path = Path(self.logs.destinations.error_files.get(local_rank) or "/nonexistent")
        try:
            message = json.loads(path.read_text())["message"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        if isinstance(message, dict):
            message = message.get("message", "")
        return str(message).splitlines()[0] if message else ""
