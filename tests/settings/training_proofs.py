"""A session's own settings: checkpoints, leaving in time, invalid results, replicas. What each one changes."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from scenes import Proof, Scene, differs

import outlast
from outlast import clock
from outlast.checkpoint import manager, places
from outlast.checkpoint.places import plan_replication
from outlast.checkpoint.replica.client import Target
from outlast.config import (
    CheckpointConfig,
    Config,
    FaultToleranceConfig,
    HealthConfig,
    InProcessRestartConfig,
    PreemptionConfig,
    ReplicaDigestConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError, ExitReason, NotFinite, Unavailable
from outlast.inprocess import Wrapper
from outlast.journal import read
from outlast.numerics.validation import ErrorInjector, StepValidation
from outlast.policy.durability import OwedSaves
from outlast.policy.rerun import StepRun
from outlast.runtime.postmortem import read_diagnosis
from outlast.session import preemption
from outlast.session.inprocess_scope import InProcessScope
from outlast.session.saves import MIN_TIMED_STEPS, DueSave, SaveSchedule

# -- checkpoints ---------------------------------------------------------------------------------------------------


def saves_where_it_is_told(name: str) -> Proof:
    """Return the proof that generations come into being in the folder that a setting names."""

    def proof(scene: Scene) -> None:
        for folder in (scene.folder / "one", scene.folder / "other"):
            settings = {"directory": None if name == "save" else f"{folder}-global", name: str(folder)}
            assert scene.saved(total=2, at=str(folder), **settings) == [2]

    return proof


def saves_to_near_tiers_in_between(scene: Scene) -> None:
    """Between two saves to all tiers the near ones get their own."""
    local = str(scene.folder / "local")
    near = scene.saved(
        total=5,
        at=local,
        save_interval=5,
        non_persistent_save_interval=3,
        local_directory=local,
        local_most_recent_k=-1,
    )
    assert near == [3, 5]
    assert scene.saved(total=5) == [5]


def chosen_interval(config: CheckpointConfig) -> int:
    rhythm = SaveSchedule(config, decides=True, world_size=1024, has_near=False)
    for _ in range(MIN_TIMED_STEPS + 2):
        rhythm.note_step(1.0)
    return next(number for number in range(1, 100_000) if rhythm.request(number, cost_s=2.0) == DueSave.ALL)


def waits_for_the_commit(scene: Scene) -> None:
    """With async_save off, a save returns once it is committed."""
    waits = Mock(wraps=manager.wait_for_all)
    scene.patch.setattr(manager, "wait_for_all", waits)
    counts = []
    for number, value in enumerate((True, False)):
        waits.reset_mock()
        scene.saved(total=4, directory=str(scene.folder / str(number)), async_save=value)
        counts.append(waits.call_count)
    assert counts[1] > counts[0]


def copies_beside_training(scene: Scene) -> None:
    """With overlap_staging it is asked what only the optimizer's step changes, to be copied later."""
    asks = Mock(wraps=manager.changed_only_by_step)
    scene.patch.setattr(manager, "changed_only_by_step", asks)
    scene.saved(total=2, directory=str(scene.folder / "at once"))
    assert not asks.called
    scene.saved(total=2, directory=str(scene.folder / "beside"), overlap_staging=True)
    assert asks.called


def refuses_copies_that_nothing_can_hold(scene: Scene) -> None:
    """replication=True without a place that outlives a worker is refused; left to itself it is done without."""
    assert scene.saved(total=2) == [2]
    with pytest.raises(ConfigError, match="nothing outlives a worker here"):
        scene.saved(total=2, replication=True)


def bounds_a_call(scene: Scene) -> None:
    """A listing that does not return is abandoned once response_timeout is over."""
    is_over = threading.Event()
    scene.patch.setattr(places, "look_at", lambda _: is_over.wait())
    for timeout in (0.1, 1.5):
        config = CheckpointConfig(
            directory=str(scene.folder / str(timeout)), response_timeout=timeout, restore_timeout=0.0
        )
        began_s = time.monotonic()
        with pytest.raises(Unavailable, match=f"has not responded for {timeout:.0f} s"):
            manager.CheckpointManager(config)
        assert time.monotonic() - began_s >= timeout
    is_over.set()


def bounds_a_wait(scene: Scene) -> None:
    """Within restore_timeout a directory that cannot be listed is listed again; without it there is one attempt."""
    fails = Mock(side_effect=OSError(errno.EIO, "the disk fails"))
    scene.patch.setattr(places, "look_at", fails)
    counts = []
    for timeout in (0.0, 1.5):
        fails.reset_mock()
        with pytest.raises(Unavailable, match="the disk fails"):
            manager.CheckpointManager(CheckpointConfig(directory=str(scene.folder / "x"), restore_timeout=timeout))
        counts.append(fails.call_count)
    assert counts[0] == 1 < counts[1]


def copies(config: CheckpointConfig) -> Any:
    """Return where a rank's shard goes, on four nodes of two ranks."""
    nodes = tuple(f"n{rank // 2}" for rank in range(8))
    targets = {node: Target(node=node, host="h", port=1) for node in nodes}
    return plan_replication(config, nodes, targets, 0)


def reads_the_key(scene: Scene) -> None:
    """The secret comes from the file that is named, which therefore has to be there."""
    with pytest.raises((ConfigError, CheckpointError), match="no-key"):
        scene.saved(total=2, replication_key_file=str(scene.folder / "no-key"))


def keeps(scene: Scene, *, at: str = "", **settings: Any) -> list[int]:
    """Return what is kept of saves every two steps, in a fresh folder."""
    fresh = scene.folder / str(len(list(scene.folder.iterdir())))
    given = {"directory": str(fresh / "global"), "async_save": False, "most_recent_k": 2, "suspect_window": 0}
    if at:
        given[at] = str(fresh / at)
    return scene.saved(total=9, at=given[at] if at else "", **{**given, **settings})


def keeps_the_newest(scene: Scene) -> None:
    """most_recent_k generations stay, -1 = all."""
    assert keeps(scene) == [8, 9]
    assert keeps(scene, most_recent_k=3) == [6, 8, 9]
    assert keeps(scene, most_recent_k=-1) == [2, 4, 6, 8, 9]


def keeps_the_newest_near(scene: Scene) -> None:
    """The same for the local tier, for itself."""
    assert keeps(scene, at="local_directory")[-2:] == [8, 9]
    assert keeps(scene, at="local_directory", local_most_recent_k=-1) == [2, 4, 6, 8, 9]


def keeps_multiples(scene: Scene) -> None:
    """Generations at multiples of save_retain_interval stay, however old they are, and no others."""
    assert keeps(scene, save_retain_interval=4) == [4, 8, 9]
    assert keeps(scene) == [8, 9]


def keeps_one_that_is_beyond_doubt(scene: Scene) -> None:
    """One generation older than the window stays, in case what came after it proves bad."""
    assert keeps(scene, suspect_window=20) == [2, 8, 9]
    assert keeps(scene) == [8, 9]


def stops_after_failed_saves(scene: Scene) -> None:
    """Saves that failed in a row stop training at the limit, and never with 0."""
    for limit, stops in ((2, True), (0, False)):
        config = CheckpointConfig(directory=str(scene.folder / str(limit)), max_consecutive_save_failures=limit)
        with scene.session(Config(checkpoint=config)) as run:
            assert run._saves is not None
            outcomes = run._saves.manager._outcomes
            outcomes.num_failures, outcomes.last_error = 2, CheckpointError("disk full")
            for _ in run.steps({"weight": torch.zeros(1)}, total=1):
                if stops:
                    with pytest.raises(CheckpointError, match="2 saves in a row failed"):
                        run.save({"weight": torch.zeros(1)})
                else:
                    run.save({"weight": torch.zeros(1)})
                break


def stops_when_commits_are_overdue(scene: Scene) -> None:
    """A commit that was due for longer than the limit stops training with 93, and never with 0."""
    for limit_s in (60.0, 0.0):
        config = CheckpointConfig(directory=str(scene.folder / str(limit_s)), max_durable_lag=limit_s)
        with scene.session(Config(checkpoint=config)) as run:
            assert run._saves is not None
            run._saves.manager._outcomes._owed = OwedSaves().add(99, clock.now_s() - 1000)
            steps = run.steps({"weight": torch.zeros(1)}, total=3)
            next(steps)
            if limit_s:
                with pytest.raises(SystemExit, match="93"):
                    next(steps)
            else:
                next(steps)
                steps.close()


def gives_a_save_its_time(scene: Scene) -> None:
    """A save that takes longer than save_timeout counts as failed."""
    limits = []
    for timeout in (600.0, 5.0):
        config = CheckpointConfig(directory=str(scene.folder / str(timeout)), save_timeout=timeout)
        with scene.session(Config(checkpoint=config)) as run:
            assert run._saves is not None
            limits.append(run._saves.manager._limit_s)
    assert limits[0] - limits[1] == 2 * 595.0


def loads_from_elsewhere(scene: Scene) -> None:
    """Where the own folder holds nothing yet, the state comes from ``load``, which is left as it is."""
    first = str(scene.folder / "first")
    scene.saved(total=4, directory=first)
    config = CheckpointConfig(directory=str(scene.folder / "second"), load=first)
    trained = scene.train(Config(checkpoint=config), total=6)
    assert trained.begun == [4, 5]
    assert trained.weight == 6.0
    assert (
        scene.train(Config(checkpoint=CheckpointConfig(directory=str(scene.folder / "third"))), total=6).begun[0] == 0
    )


def refuses_other_ways_to_save_near(_: Scene) -> None:
    """A way to save that is not there is refused by name."""
    with pytest.raises(ConfigError, match="non_persistent_local_ckpt_algo='other'"):
        CheckpointConfig(directory="x", non_persistent_local_ckpt_algo="other")


def refuses_kinds_of_near_saves_that_do_not_fit(_: Scene) -> None:
    """Megatron's kinds name a near tier, which has to be there."""
    with pytest.raises(ConfigError, match="non_persistent_ckpt_type='local' needs local_directory"):
        CheckpointConfig(directory="x", non_persistent_ckpt_type="local")
    assert CheckpointConfig(local_directory="x", non_persistent_ckpt_type="local").local_directory == "x"


def refuses_other_formats(_: Scene) -> None:
    """Generations are written in one format; another is refused by name."""
    with pytest.raises(ConfigError, match="ckpt_format='zarr' is not supported"):
        CheckpointConfig(directory="x", ckpt_format="zarr")


def loads_the_newest_whatever_it_holds(scene: Scene) -> None:
    """Without prefer_finite a load takes a generation with infinite numbers, and with it an older one."""
    folders = [scene.folder / "one", scene.folder / "two"]
    config = CheckpointConfig(directory=str(folders[0]), save_interval=1, async_save=False)
    with scene.session(Config(checkpoint=config)) as run:
        state = {"weight": torch.zeros(1)}
        for iteration in run.steps(state, total=2):
            state["weight"].fill_(float("inf") if iteration else 1.0)
        run.close()
    shutil.copytree(*folders)
    begun = []
    for folder, prefer in zip(folders, (True, False), strict=True):
        config = CheckpointConfig(directory=str(folder), prefer_finite=prefer)
        begun.append(scene.train(Config(checkpoint=config), total=3).begun)
    assert begun == [[1, 2], [2]]


def goes_on_with_another_runs_generations(scene: Scene) -> None:
    """Without resume_from_other_run a run with a name of its own is refused where another one saved."""
    trained = []
    for run, resumes in (("one", False), ("other", False), ("other", True)):
        checkpoint = CheckpointConfig(directory=str(scene.folder / "ckpt"), resume_from_other_run=resumes)
        trained.append(scene.train(Config(checkpoint=checkpoint, run_dir=str(scene.folder / run)), total=3))
    assert [one.exit_code for one in trained] == [None, ExitReason.NO_PROGRESS, None]
    assert [one.iteration for one in trained] == [3, 0, 3]


def keeps_what_the_checkpoint_lacks(scene: Scene) -> None:
    """With missing="keep" a value that is newer than the checkpoint stays; without it the load fails by name."""
    where = str(scene.folder / "ckpt")
    for missing, state in (("error", {"old": 1}), ("keep", {"old": 5, "new": 6}), ("error", {"old": 7, "newer": 8})):
        config = Config(checkpoint=CheckpointConfig(directory=where, save_interval=1, missing=missing))
        is_refused = "newer" in state
        refusal = pytest.raises(CheckpointError, match=r"saved without newer.*checkpoint\.missing")
        with scene.session(config) as run, refusal if is_refused else nullcontext():
            iteration = run.restore(state)
            assert state == ({"old": 1, "new": 6} if iteration else {"old": 1})
            run.begin_step()
            run.end_step()
            run.finish(state)


C = CheckpointConfig
AUTO = {"directory": "x", "save_interval": "auto"}
CHECKPOINT: dict[str, Proof] = {
    "directory": saves_where_it_is_told("directory"),
    "local_directory": saves_where_it_is_told("local_directory"),
    "save_interval": lambda scene: _check(scene.saved(total=7, save_interval=3, most_recent_k=-1), [3, 6, 7]),
    "non_persistent_save_interval": saves_to_near_tiers_in_between,
    "rank_mttf_hours": differs(chosen_interval, C, AUTO, rank_mttf_hours=100.0),
    "async_save": waits_for_the_commit,
    "overlap_staging": copies_beside_training,
    "replication": refuses_copies_that_nothing_can_hold,
    "replication_factor": differs(copies, C, {"directory": "x"}, replication_factor=3),
    "replication_jump": differs(copies, C, {"directory": "x"}, replication_jump=4),
    "replication_parity": differs(copies, C, {"directory": "x"}, replication_parity=2),
    "replication_timeout": differs(copies, C, {"directory": "x"}, replication_timeout=3.0),
    "replication_key_file": reads_the_key,
    "most_recent_k": keeps_the_newest,
    "local_most_recent_k": keeps_the_newest_near,
    "save_retain_interval": keeps_multiples,
    "suspect_window": keeps_one_that_is_beyond_doubt,
    "max_consecutive_save_failures": stops_after_failed_saves,
    "response_timeout": bounds_a_call,
    "restore_timeout": bounds_a_wait,
    "max_durable_lag": stops_when_commits_are_overdue,
    "save_timeout": gives_a_save_its_time,
    "save": saves_where_it_is_told("save"),
    "load": loads_from_elsewhere,
    "non_persistent_local_ckpt_dir": saves_where_it_is_told("non_persistent_local_ckpt_dir"),
    "non_persistent_local_ckpt_algo": refuses_other_ways_to_save_near,
    "non_persistent_ckpt_type": refuses_kinds_of_near_saves_that_do_not_fit,
    "ckpt_format": refuses_other_formats,
    "missing": keeps_what_the_checkpoint_lacks,
    "prefer_finite": loads_the_newest_whatever_it_holds,
    "resume_from_other_run": goes_on_with_another_runs_generations,
}


def _check(seen: Any, wanted: Any) -> None:
    assert seen == wanted


# -- leaving in time -----------------------------------------------------------------------------------------------


def leaves_when(scene: Scene, body: Any = None, **settings: Any) -> tuple[int | None, int]:
    """Return exit code and iteration of a run with these settings, a few seconds long unless it is told to leave."""

    def step(run: outlast.Session) -> None:
        if body is not None:
            body(run)
        time.sleep(0.01)

    trained = scene.train(Config(preemption=PreemptionConfig(**settings)), step, total=500)
    return trained.exit_code, trained.iteration


def stops_after_every_interval(scene: Scene) -> None:
    """exit_interval stops the run after each iteration that it divides, with everything saved."""
    checkpoint = CheckpointConfig(directory=str(scene.folder / "global"))
    config = Config(preemption=PreemptionConfig(exit_interval=4), checkpoint=checkpoint)
    assert [scene.train(config, total=10).iteration for _ in range(3)] == [4, 8, 10]


def stops_after_its_time(scene: Scene) -> None:
    """exit_duration_in_mins after its start the run leaves, and not before."""
    code, iteration = leaves_when(scene, exit_duration_in_mins=0.5 / 60, poll_interval=0.05)
    assert code is not None
    assert 0 < iteration < 500
    config = Config(preemption=PreemptionConfig(exit_duration_in_mins=60))
    assert scene.train(config, total=20).exit_code is None


def lets_signals_be(scene: Scene) -> None:
    """With exit_signal_handler off, a signal does what it does without a session; with it on, the run ends in order."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        body = lambda run: run.iteration == 2 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        trained = scene.train(Config(preemption=PreemptionConfig(exit_signal_handler=False)), body, total=20)
        assert (trained.exit_code, trained.iteration, seen) == (None, 20, [signal.SIGTERM])
        code, iteration = leaves_when(scene, body)
        assert code == 128 + signal.SIGTERM
        assert iteration < 500
    finally:
        signal.signal(signal.SIGTERM, before)


def leaves_on_the_named_signal(scene: Scene) -> None:
    """The signal that is named tells the run to leave, and no other one is touched."""
    body = lambda run: run.iteration == 2 and os.kill(os.getpid(), signal.SIGUSR2)  # noqa: E731
    assert leaves_when(scene, body, exit_signal="SIGUSR2")[0] == 128 + signal.SIGUSR2
    before = signal.getsignal(signal.SIGTERM)
    with scene.session(Config(preemption=PreemptionConfig(exit_signal="SIGUSR2"))):
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


def told(scene: Scene, **settings: Any) -> dict[str, Any]:
    """Return with what a session listens."""
    listener = Mock(is_requested=False)
    scene.patch.setattr(preemption, "ShutdownListener", listener)
    with scene.session(Config(preemption=PreemptionConfig(**settings))):
        pass
    scene.patch.undo()
    return dict(listener.call_args.kwargs)


def listens(name: str, **settings: Any) -> Proof:
    """Return the proof that a setting changes how a session listens."""

    def proof(scene: Scene) -> None:
        assert told(scene)[name] != told(scene, **settings)[name]

    return proof


def leaves_before_the_job_ends(scene: Scene) -> None:
    """preempt_time before Slurm ends the job the run leaves; with 0 it does not look."""
    scene.patch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 4000))
    end = Mock(return_value=Mock(poll=lambda: None))
    scene.patch.setattr(preemption, "EndTime", end)
    for seconds in (60.0, 90.0, 0.0):
        scene.train(Config(preemption=PreemptionConfig(preempt_time=seconds)), total=2)
    assert [call.kwargs["lead_s"] for call in end.call_args_list] == [60.0, 90.0]


def leaves_on_a_file(scene: Scene) -> None:
    """The coming of the file that is named means: leave."""
    path = scene.folder / "leave"
    body = lambda run: run.iteration == 3 and path.touch()  # noqa: E731
    code, iteration = leaves_when(scene, body, notice_file=str(path), poll_interval=0.02)
    assert code is not None
    assert 3 < iteration < 500


def leaves_on_an_answer(scene: Scene) -> None:
    """An address whose answer is more than none means: leave; the header that is named goes with the question."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = b"TERMINATE" if self.headers["X-Wants"] == "word" and self.server.has_word else b"none"  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.has_word = False  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            body = lambda run: run.iteration == 3 and setattr(server, "has_word", True)  # noqa: E731
            where = {"notice_url": f"http://127.0.0.1:{server.server_port}/", "poll_interval": 0.02}
            code, iteration = leaves_when(scene, body, notice_url_header="X-Wants: word", **where)
            assert code is not None
            assert 3 < iteration < 500
            trained = scene.train(Config(preemption=PreemptionConfig(**where)), lambda _: time.sleep(0.01), total=20)
            assert trained.exit_code is None
        finally:
            server.shutdown()
            thread.join()


def leaves_on_a_plugins_word(scene: Scene) -> None:
    """A source of one's own is made by its name and asked; one that is not there is refused."""
    (scene.folder / "own_notices.py").write_text(
        "import outlast.preemption.listener as s\n"
        "class Source:\n"
        "    name, asked = 'own', 0\n"
        "    def poll(self):\n"
        "        Source.asked += 1\n"
        "        return s.NoticeReceived('the maintenance begins') if Source.asked > 3 else None\n"
    )
    scene.patch.syspath_prepend(str(scene.folder))
    code, iteration = leaves_when(scene, notice_plugin="own_notices:Source", poll_interval=0.02)
    assert code is not None
    assert iteration < 500
    assert "own (the maintenance begins)" in scene.log.text
    sys.modules.pop("own_notices")
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="notice_plugin='own_notices:Other'"):
        scene.train(Config(preemption=PreemptionConfig(notice_plugin="own_notices:Other")))


PREEMPTION: dict[str, Proof] = {
    "exit_signal_handler": lets_signals_be,
    "exit_signal": leaves_on_the_named_signal,
    "exit_signal_handler_for_dataloader": listens("keep_forked", exit_signal_handler_for_dataloader=True),
    "preempt_time": leaves_before_the_job_ends,
    "shutdown_timeout": listens("deadline_s", shutdown_timeout=3.0),
    "notice_file": leaves_on_a_file,
    "notice_url": leaves_on_an_answer,
    "notice_url_header": leaves_on_an_answer,
    "notice_plugin": leaves_on_a_plugins_word,
    "poll_interval": listens("poll_interval_s", poll_interval=1.0),
    "exit_duration_in_mins": stops_after_its_time,
    "exit_interval": stops_after_every_interval,
}


# -- invalid results -----------------------------------------------------------------------------------------------


def runs_with_a_nan(scene: Scene, **settings: Any) -> tuple[int | None, int]:
    """Return exit code of a run whose third step is NaN once, and how often its body ran."""
    ran: list[int] = []

    def body(run: outlast.Session) -> None:
        for attempt in run.attempts():
            ran.append(run.iteration)
            attempt.validate(torch.tensor(float("nan") if run.iteration == 2 and ran.count(2) == 1 else 1.0))

    trained = scene.train(Config(rerun_state_machine=RerunStateMachineConfig(**settings)), body, total=5)
    return trained.exit_code, len(ran)


def runs_an_invalid_step_again(scene: Scene) -> None:
    """A NaN has its step run again; with check_for_nan_in_loss off it is trained on, and with rerun_mode disabled it
    raises."""
    assert runs_with_a_nan(scene) == (None, 6)
    assert runs_with_a_nan(scene, check_for_nan_in_loss=False) == (None, 5)
    assert runs_with_a_nan(scene, rerun_mode="disabled", check_for_nan_in_loss=False) == (None, 5)
    with pytest.raises(NotFinite, match="rerun_mode='disabled' runs no step again"):
        runs_with_a_nan(scene, rerun_mode="disabled")


def rejected(config: RerunStateMachineConfig) -> list[str | None]:
    """Return what is said of values one after the other."""
    validation, said = StepValidation(config, WorkerEnv(), "cpu"), []
    for value in [1.0, 50.0, 1.0, *[1.0] * 20, 30.0, float("nan")]:
        validation.begin_step(0)
        validation.take_number(value, "loss", rejects=None, message="", tolerance=0.0)
        judged = validation.judge()
        said.append(None if judged is None else judged.rejected.message)
        validation.end_step()
    return said


def struck(config: RerunStateMachineConfig) -> list[bool]:
    injector, found = ErrorInjector(config, "job-0-0"), []
    for call in range(20):
        injector.struck.clear()
        found.append(injector.strikes(StepRun.FIRST_RUN, call, 0))
        found.append(injector.strikes(StepRun.SECOND_RUN, call, 0))
    return found


def says_how_often_to_try(scene: Scene) -> None:
    """What is left behind for the launcher says how often the same device may be tried again."""
    for number in (2, 5):
        folder = scene.folder / str(number)
        config = Config(run_dir=str(folder), rerun_state_machine=RerunStateMachineConfig(max_same_device_reruns=number))

        def body(run: outlast.Session) -> None:
            for attempt in run.attempts():
                attempt.validate(torch.tensor(float("nan")))

        assert scene.train(config, body).exit_code == 16
        diagnosis = read_diagnosis(folder, "job", 0, 0)
        assert diagnosis is not None
        assert diagnosis.max_tries == number


R = RerunStateMachineConfig
SPIKES = {"check_for_spiky_loss": True, "spike_warmup": 2, "spike_window": 30}
RERUN: dict[str, Proof] = {
    "rerun_mode": runs_an_invalid_step_again,
    "check_for_nan_in_loss": runs_an_invalid_step_again,
    "check_for_spiky_loss": differs(rejected, R, {"spike_warmup": 1}, check_for_spiky_loss=True),
    "spiky_loss_factor": differs(rejected, R, {**SPIKES, "spike_warmup": 1}, spiky_loss_factor=60.0),
    "spike_warmup": differs(rejected, R, SPIKES, spike_warmup=1),
    "spike_window": differs(rejected, R, SPIKES, spike_window=10),
    "max_same_device_reruns": says_how_often_to_try,
    "error_injection_rate": differs(struck, R, error_injection_rate=2),
    "error_injection_type": differs(struck, R, {"error_injection_rate": 2}, error_injection_type="persistent_error"),
}


# -- the whole config ----------------------------------------------------------------------------------------------


def has(part: str, **settings: Any) -> Proof:
    """Return the proof that a session has a part with a setting, and has none without."""

    def proof(scene: Scene) -> None:
        found = []
        for given in ({}, settings):
            with scene.session(Config(**given)) as run:
                for _ in run.steps({"model": torch.nn.Linear(2, 2)}, total=1):
                    pass
                found.append(getattr(run, f"_{part}") is not None)
        assert found == [False, True]

    return proof


def writes_its_journal(scene: Scene) -> None:
    """The journal is in run_dir; a launcher's comes before it, which is said."""
    scene.train(Config(run_dir=str(scene.folder / "run")))
    assert list(read(scene.folder / "run"))
    scene.patch.setenv("OUTLAST_RUN_DIR", str(scene.folder / "launchers"))
    scene.train(Config(run_dir=str(scene.folder / "other")))
    assert list(read(scene.folder / "launchers"))
    assert "without effect here: run_dir" in scene.log.text
    assert "--run-dir" in scene.log.text


def uses_its_timeouts(scene: Scene) -> None:
    """The session watches with the timeouts of its config; what needs outlast run is said by name."""
    config = FaultToleranceConfig(enable_ft_package=False, rank_heartbeat_timeout=3.0, max_node_faults=1)
    with scene.session(Config(fault_tolerance=config, run_dir=str(scene.folder))) as run:
        assert run.fault_tolerance.rank_heartbeat_timeout == 3.0
        assert run._monitor._watch is None
    assert "a hung rank is not noticed (fault_tolerance.enable_ft_package is off)" in scene.log.text
    assert "without effect here: fault_tolerance.max_node_faults (start the script with outlast run)" in scene.log.text


def has_to_be_wrapped(scene: Scene) -> None:
    """in_process asks for a Wrapper around the session, and says so where there is none."""
    with pytest.raises(ConfigError, match="decorate the function"):
        scene.train(Config(in_process=True))


def has_the_wrappers_settings(scene: Scene) -> None:
    """A Wrapper takes the section from the config; a session with other settings than its Wrapper is refused, and one
    without a Wrapper says that they have no effect."""
    restart = InProcessRestartConfig(soft_timeout=5.0)
    config = Config(in_process_restart=restart)
    assert Wrapper(config).config is restart
    (scene.folder / "outlast.toml").write_text("[in_process_restart]\nsoft_timeout = 5\n")
    assert Wrapper(scene.folder / "outlast.toml").config == restart
    scene.train(config)
    assert "without effect here: in_process_restart.soft_timeout" in scene.log.text
    call: Any = SimpleNamespace(config=InProcessRestartConfig())
    scene.patch.setattr("outlast.session.inprocess_scope.current_handle", lambda: call)
    with pytest.raises(ConfigError, match=r"soft_timeout=5.0 of the session differs from the Wrapper's 60.0"):
        InProcessScope(config)


def says_that_nodes_are_not_looked_at(scene: Scene) -> None:
    """Limits of nodes have no effect in a session, which is said unless the launcher has a file; the rest of the
    section is the session's own."""
    config = Config(health=HealthConfig(min_open_files=5, process_group_interval=2))
    scene.train(config)
    assert "without effect here: health.min_open_files (" in scene.log.text
    scene.log.clear()
    scene.patch.setenv("OUTLAST_CONFIG_FILE", "run.toml")
    scene.train(config)
    assert "without effect" not in scene.log.text


def draws_from_its_seed(scene: Scene) -> None:
    """The same seed draws the same numbers, another one others."""
    drawn = []
    for seed in (1, 1, 2):
        with scene.session(Config(seed=seed)):
            drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] != drawn[2]


def causes_planned_faults(scene: Scene) -> None:
    """The faults of the plan befall the run."""
    (scene.folder / "plan.toml").write_text('[[faults]]\nname = "nan"\nkind = "nan"\ntarget = "loss"\niteration = 2\n')
    with scene.session(Config(fault_plan=str(scene.folder / "plan.toml"))) as run:
        assert run._faults is not None
    with scene.session(Config()) as run:
        assert run._faults is None


CONFIG: dict[str, Proof] = {
    "run_dir": writes_its_journal,
    "checkpoint": lambda scene: _check(scene.saved(total=2), [2]),
    "fault_tolerance": uses_its_timeouts,
    "rerun_state_machine": runs_an_invalid_step_again,
    "replica_digest": has("replicas", replica_digest=ReplicaDigestConfig(interval=1)),
    "straggler_detection": has("slow_ranks", straggler_detection=StragglerDetectionConfig(enabled=True)),
    "in_process": has_to_be_wrapped,
    "in_process_restart": has_the_wrappers_settings,
    "preemption": stops_after_every_interval,
    "health": says_that_nodes_are_not_looked_at,
    "fault_plan": causes_planned_faults,
    "seed": draws_from_its_seed,
}
REPLICA_DIGEST: dict[str, Proof] = {"interval": has("replicas", replica_digest=ReplicaDigestConfig(interval=1))}
