"""Proofs that a session's settings have an effect: checkpoints, preemption, invalid results, the whole config."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scenes import Proof, Scene, differs

import outlast
from outlast.checkpoint.places import plan_replication
from outlast.checkpoint.replica.client import Target
from outlast.config import (
    CheckpointConfig,
    Config,
    FaultToleranceConfig,
    HealthConfig,
    InProcessRestartConfig,
    PreemptionConfig,
    RerunStateMachineConfig,
)
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError
from outlast.inprocess import Wrapper
from outlast.journal import read
from outlast.numerics.validation import StepValidation
from outlast.runtime.diagnoses import read_diagnosis
from outlast.session.inprocess_scope import InProcessScope

# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoints_are_saved_in(name: str) -> Proof:
    """Return the proof that checkpoints are saved in the folder of a setting."""

    def proof(scene: Scene) -> None:
        for folder in (scene.folder / "one", scene.folder / "other"):
            settings = {"directory": None if name == "save" else f"{folder}-global", name: str(folder)}
            assert scene.saved(total=2, at=str(folder), **settings) == [2]

    return proof


def saves_wait_for_the_commit_unless_async(scene: Scene) -> None:
    """With async_save off, a save returns once it is committed; with it on, once the state is copied."""
    for waits in (True, False):
        where = CheckpointConfig(directory=str(scene.folder / str(waits)), async_save=not waits)
        with scene.session(Config(checkpoint=where)) as run:
            state = {"weight": torch.zeros(1 << 24)}
            for _ in run.steps(state, total=1):
                handle = run.save(state)
                assert handle is not None
                assert handle.done is waits


def replication_needs_a_process_that_outlives_workers(scene: Scene) -> None:
    """replication=True without a process that outlives a worker is rejected; by default training runs without
    replicas."""
    assert scene.saved(total=2) == [2]
    with pytest.raises(ConfigError, match="nothing outlives a worker here"):
        scene.saved(total=2, replication=True)


def replica_targets(config: CheckpointConfig) -> Any:
    """Return the targets of a rank's shard, on four nodes of two ranks."""
    nodes = tuple(f"n{rank // 2}" for rank in range(8))
    targets = {node: Target(node=node, host="h", port=1) for node in nodes}
    return plan_replication(config, nodes, targets, 0)


def the_key_file_is_read(scene: Scene) -> None:
    """The secret is read from the configured file, which must exist."""
    with pytest.raises((ConfigError, CheckpointError), match="no-key"):
        scene.saved(total=2, replication_key_file=str(scene.folder / "no-key"))


def an_empty_directory_loads_from_load(scene: Scene) -> None:
    """If the run's own directory is empty, the state is loaded from ``load``, which is not changed."""
    first = str(scene.folder / "first")
    scene.saved(total=4, directory=first)
    config = CheckpointConfig(directory=str(scene.folder / "second"), load=first)
    trained = scene.train(Config(checkpoint=config), total=6)
    assert trained.begun == [4, 5]
    assert trained.weight == 6.0
    assert (
        scene.train(Config(checkpoint=CheckpointConfig(directory=str(scene.folder / "third"))), total=6).begun[0] == 0
    )


C = CheckpointConfig
AUTO = {"directory": "x", "save_interval": "auto"}
CHECKPOINT: dict[str, Proof] = {
    "directory": checkpoints_are_saved_in("directory"),
    "local_directory": checkpoints_are_saved_in("local_directory"),
    "save_interval": lambda scene: _check(scene.saved(total=7, save_interval=3, most_recent_k=-1), [3, 6, 7]),
    "async_save": saves_wait_for_the_commit_unless_async,
    "replication": replication_needs_a_process_that_outlives_workers,
    "replication_factor": differs(replica_targets, C, {"directory": "x"}, replication_factor=3),
    "replication_jump": differs(replica_targets, C, {"directory": "x"}, replication_jump=4),
    "replication_timeout": differs(replica_targets, C, {"directory": "x"}, replication_timeout=3.0),
    "replication_key_file": the_key_file_is_read,
    "save": checkpoints_are_saved_in("save"),
    "load": an_empty_directory_loads_from_load,
    "non_persistent_local_ckpt_dir": checkpoints_are_saved_in("non_persistent_local_ckpt_dir"),
}


def _check(observed: Any, expected: Any) -> None:
    assert observed == expected


# -- preemption ----------------------------------------------------------------------------------------------------


def train_until_exit(scene: Scene, body: Any = None, **settings: Any) -> tuple[int | None, int]:
    """Return exit code and iteration of a run with these settings, which takes a few seconds unless it is stopped."""

    def step(run: outlast.Session) -> None:
        if body is not None:
            body(run)
        time.sleep(0.01)

    trained = scene.train(Config(preemption=PreemptionConfig(**settings)), step, total=500)
    return trained.exit_code, trained.iteration


def the_run_stops_at_each_exit_interval(scene: Scene) -> None:
    """exit_interval stops the run after each multiple of the interval, with everything saved."""
    checkpoint = CheckpointConfig(directory=str(scene.folder / "global"))
    config = Config(preemption=PreemptionConfig(exit_interval=4), checkpoint=checkpoint)
    assert [scene.train(config, total=10).iteration for _ in range(3)] == [4, 8, 10]


def the_run_stops_after_its_duration(scene: Scene) -> None:
    """The run exits exit_duration_in_mins after its start, and not before."""
    code, iteration = train_until_exit(scene, exit_duration_in_mins=0.5 / 60, poll_interval=0.05)
    assert code is not None
    assert 0 < iteration < 500
    config = Config(preemption=PreemptionConfig(exit_duration_in_mins=60))
    assert scene.train(config, total=20).exit_code is None


def signals_are_unchanged_without_the_handler(scene: Scene) -> None:
    """With exit_signal_handler off, a signal keeps its effect; with it on, the run ends in an orderly way."""
    observed: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: observed.append(number))
    try:
        body = lambda run: run.iteration == 2 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        trained = scene.train(Config(preemption=PreemptionConfig(exit_signal_handler=False)), body, total=20)
        assert (trained.exit_code, trained.iteration, observed) == (None, 20, [signal.SIGTERM])
        code, iteration = train_until_exit(scene, body)
        assert code == 128 + signal.SIGTERM
        assert iteration < 500
    finally:
        signal.signal(signal.SIGTERM, before)


def forked_processes_ignore_the_signal(scene: Scene) -> None:
    """With exit_signal_handler_for_dataloader, a process that training forks ignores a signal to the whole group."""
    codes = []
    for keeps in (True, False):
        config = PreemptionConfig(exit_signal="SIGUSR2", exit_signal_handler_for_dataloader=keeps)
        with scene.session(Config(preemption=config)):
            if (child := os.fork()) == 0:
                time.sleep(0.5)
                os._exit(0)
            time.sleep(0.1)
            os.kill(child, signal.SIGUSR2)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert codes == [0, -signal.SIGUSR2]


def notices_are_polled_at_the_interval(scene: Scene) -> None:
    """A preemption notice is detected at the next poll."""
    body = lambda run: run.iteration == 3 and (scene.folder / "leave").touch()  # noqa: E731
    for interval_s, is_detected in ((30.0, False), (0.02, True)):
        (scene.folder / "leave").unlink(missing_ok=True)
        code, _ = train_until_exit(scene, body, notice_file=str(scene.folder / "leave"), poll_interval=interval_s)
        assert (code is not None) is is_detected


def the_configured_signal_stops_the_run(scene: Scene) -> None:
    """The configured signal stops the run, and other signals are not changed."""
    body = lambda run: run.iteration == 2 and os.kill(os.getpid(), signal.SIGUSR2)  # noqa: E731
    assert train_until_exit(scene, body, exit_signal="SIGUSR2")[0] == 128 + signal.SIGUSR2
    before = signal.getsignal(signal.SIGTERM)
    with scene.session(Config(preemption=PreemptionConfig(exit_signal="SIGUSR2"))):
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


def a_url_response_stops_the_run(scene: Scene) -> None:
    """A response other than "none" is a preemption notice; the configured header is sent with the request."""

    class ResponseHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = b"TERMINATE" if self.headers["X-Wants"] == "word" and self.server.has_word else b"none"  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), ResponseHandler) as server:
        server.has_word = False  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            body = lambda run: run.iteration == 3 and setattr(server, "has_word", True)  # noqa: E731
            where = {"notice_url": f"http://127.0.0.1:{server.server_port}/", "poll_interval": 0.02}
            code, iteration = train_until_exit(scene, body, notice_url_header="X-Wants: word", **where)
            assert code is not None
            assert 3 < iteration < 500
            trained = scene.train(Config(preemption=PreemptionConfig(**where)), lambda _: time.sleep(0.01), total=20)
            assert trained.exit_code is None
        finally:
            server.shutdown()
            thread.join()


def a_notice_plugin_stops_the_run(scene: Scene) -> None:
    """A plug-in source is created by its name and polled; a missing one is rejected."""
    (scene.folder / "own_notices.py").write_text(
        "import outlast.preemption.listener as s\n"
        "class Source:\n"
        "    name, asked = 'own', 0\n"
        "    def poll(self):\n"
        "        Source.asked += 1\n"
        "        return s.NoticeReceived('the maintenance begins') if Source.asked > 3 else None\n"
    )
    scene.patch.syspath_prepend(str(scene.folder))
    code, iteration = train_until_exit(scene, notice_plugin="own_notices:Source", poll_interval=0.02)
    assert code is not None
    assert iteration < 500
    assert "own (the maintenance begins)" in scene.log.text
    sys.modules.pop("own_notices")
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="notice_plugin='own_notices:Other'"):
        scene.train(Config(preemption=PreemptionConfig(notice_plugin="own_notices:Other")))


PREEMPTION: dict[str, Proof] = {
    "exit_signal_handler": signals_are_unchanged_without_the_handler,
    "exit_signal_handler_for_dataloader": forked_processes_ignore_the_signal,
    "exit_signal": the_configured_signal_stops_the_run,
    "notice_url": a_url_response_stops_the_run,
    "notice_url_header": a_url_response_stops_the_run,
    "notice_plugin": a_notice_plugin_stops_the_run,
    "poll_interval": notices_are_polled_at_the_interval,
    "exit_duration_in_mins": the_run_stops_after_its_duration,
    "exit_interval": the_run_stops_at_each_exit_interval,
}


# -- invalid results -----------------------------------------------------------------------------------------------


def rejected(config: RerunStateMachineConfig) -> list[str | None]:
    """Return the messages for a sequence of values."""
    validation, messages = StepValidation(config, WorkerEnv(), "cpu"), []
    for value in [1.0, 50.0, 1.0, *[1.0] * 20, 30.0, float("nan")]:
        validation.begin_step(0)
        validation.take_number(value, "loss", rejects=None, message="", tolerance=0.0)
        judged = validation.judge()
        messages.append(None if judged is None else judged.rejected.message)
        validation.end_step()
    return messages


def the_diagnosis_has_the_rerun_limit(scene: Scene) -> None:
    """The diagnosis for the launcher has the number of reruns that are allowed on the same device."""
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
    "spiky_loss_factor": differs(rejected, R, {**SPIKES, "spike_warmup": 1}, spiky_loss_factor=60.0),
    "max_same_device_reruns": the_diagnosis_has_the_rerun_limit,
}


# -- the whole config ----------------------------------------------------------------------------------------------


def the_journal_is_in_run_dir(scene: Scene) -> None:
    """The journal is in run_dir; a launcher's run directory takes precedence, which is logged."""
    scene.train(Config(run_dir=str(scene.folder / "run")))
    assert list(read(scene.folder / "run"))
    scene.patch.setenv("OUTLAST_RUN_DIR", str(scene.folder / "launchers"))
    scene.train(Config(run_dir=str(scene.folder / "other")))
    assert list(read(scene.folder / "launchers"))
    assert "without effect here: run_dir" in scene.log.text
    assert "--run-dir" in scene.log.text


def the_session_uses_its_timeouts(scene: Scene) -> None:
    """The session uses the timeouts of its config; a setting that needs outlast run is logged by name."""
    config = FaultToleranceConfig(enable_ft_package=False, rank_heartbeat_timeout=3.0, max_node_faults=1)
    with scene.session(Config(fault_tolerance=config, run_dir=str(scene.folder))) as run:
        assert run.fault_tolerance.rank_heartbeat_timeout == 3.0
    assert "a hung rank is not detected (fault_tolerance.enable_ft_package is off)" in scene.log.text
    assert "without effect here: fault_tolerance.max_node_faults (start the script with outlast run)" in scene.log.text


def the_session_has_the_wrappers_settings(scene: Scene) -> None:
    """A Wrapper takes the section from the config; a session with settings that differ from its Wrapper's is
    rejected, and one without a Wrapper logs that they have no effect."""
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


def node_limits_are_logged_as_without_effect(scene: Scene) -> None:
    """Limits of nodes have no effect in a session, which is logged unless the launcher has a config file; the rest
    of the section applies to the session."""
    config = Config(health=HealthConfig(min_open_files=5, process_group_interval=2))
    scene.train(config)
    assert "without effect here: health.min_open_files (" in scene.log.text
    scene.log.clear()
    scene.patch.setenv("OUTLAST_CONFIG_FILE", "run.toml")
    scene.train(config)
    assert "without effect" not in scene.log.text


def random_numbers_follow_the_seed(scene: Scene) -> None:
    """The same seed gives the same random numbers, and another seed gives different ones."""
    drawn = []
    for seed in (1, 1, 2):
        with scene.session(Config(seed=seed)):
            drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] != drawn[2]


CONFIG: dict[str, Proof] = {
    "run_dir": the_journal_is_in_run_dir,
    "checkpoint": lambda scene: _check(scene.saved(total=2), [2]),
    "fault_tolerance": the_session_uses_its_timeouts,
    "in_process_restart": the_session_has_the_wrappers_settings,
    "health": node_limits_are_logged_as_without_effect,
    "seed": random_numbers_follow_the_seed,
}
