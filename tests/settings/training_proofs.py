"""A session's own settings: checkpoints, leaving in time, invalid results, replicas. What each one changes."""

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


def saves_where_it_is_told(name: str) -> Proof:
    """Return the proof that checkpoints come into being in the folder that a setting names."""

    def proof(scene: Scene) -> None:
        for folder in (scene.folder / "one", scene.folder / "other"):
            settings = {"directory": None if name == "save" else f"{folder}-global", name: str(folder)}
            assert scene.saved(total=2, at=str(folder), **settings) == [2]

    return proof


def waits_for_the_commit(scene: Scene) -> None:
    """With async_save off, a save returns once it is committed; with it on, once the state is copied."""
    for waits in (True, False):
        where = CheckpointConfig(directory=str(scene.folder / str(waits)), async_save=not waits)
        with scene.session(Config(checkpoint=where)) as run:
            state = {"weight": torch.zeros(1 << 24)}
            for _ in run.steps(state, total=1):
                handle = run.save(state)
                assert handle is not None
                assert handle.done is waits


def refuses_copies_that_nothing_can_hold(scene: Scene) -> None:
    """replication=True without a place that outlives a worker is refused; left to itself it is done without."""
    assert scene.saved(total=2) == [2]
    with pytest.raises(ConfigError, match="nothing outlives a worker here"):
        scene.saved(total=2, replication=True)


def copies(config: CheckpointConfig) -> Any:
    """Return where a rank's shard goes, on four nodes of two ranks."""
    nodes = tuple(f"n{rank // 2}" for rank in range(8))
    targets = {node: Target(node=node, host="h", port=1) for node in nodes}
    return plan_replication(config, nodes, targets, 0)


def reads_the_key(scene: Scene) -> None:
    """The secret comes from the file that is named, which therefore has to be there."""
    with pytest.raises((ConfigError, CheckpointError), match="no-key"):
        scene.saved(total=2, replication_key_file=str(scene.folder / "no-key"))


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


C = CheckpointConfig
AUTO = {"directory": "x", "save_interval": "auto"}
CHECKPOINT: dict[str, Proof] = {
    "directory": saves_where_it_is_told("directory"),
    "local_directory": saves_where_it_is_told("local_directory"),
    "save_interval": lambda scene: _check(scene.saved(total=7, save_interval=3, most_recent_k=-1), [3, 6, 7]),
    "async_save": waits_for_the_commit,
    "replication": refuses_copies_that_nothing_can_hold,
    "replication_factor": differs(copies, C, {"directory": "x"}, replication_factor=3),
    "replication_jump": differs(copies, C, {"directory": "x"}, replication_jump=4),
    "replication_timeout": differs(copies, C, {"directory": "x"}, replication_timeout=3.0),
    "replication_key_file": reads_the_key,
    "save": saves_where_it_is_told("save"),
    "load": loads_from_elsewhere,
    "non_persistent_local_ckpt_dir": saves_where_it_is_told("non_persistent_local_ckpt_dir"),
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


def leaves_a_signal_to_its_parent(scene: Scene) -> None:
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


def polls_as_often_as_told(scene: Scene) -> None:
    """A notice is seen at the next poll."""
    body = lambda run: run.iteration == 3 and (scene.folder / "leave").touch()  # noqa: E731
    for interval_s, is_seen in ((30.0, False), (0.02, True)):
        (scene.folder / "leave").unlink(missing_ok=True)
        code, _ = leaves_when(scene, body, notice_file=str(scene.folder / "leave"), poll_interval=interval_s)
        assert (code is not None) is is_seen


def leaves_on_the_named_signal(scene: Scene) -> None:
    """The signal that is named tells the run to leave, and no other one is touched."""
    body = lambda run: run.iteration == 2 and os.kill(os.getpid(), signal.SIGUSR2)  # noqa: E731
    assert leaves_when(scene, body, exit_signal="SIGUSR2")[0] == 128 + signal.SIGUSR2
    before = signal.getsignal(signal.SIGTERM)
    with scene.session(Config(preemption=PreemptionConfig(exit_signal="SIGUSR2"))):
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


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
    "exit_signal_handler_for_dataloader": leaves_a_signal_to_its_parent,
    "exit_signal": leaves_on_the_named_signal,
    "notice_url": leaves_on_an_answer,
    "notice_url_header": leaves_on_an_answer,
    "notice_plugin": leaves_on_a_plugins_word,
    "poll_interval": polls_as_often_as_told,
    "exit_duration_in_mins": stops_after_its_time,
    "exit_interval": stops_after_every_interval,
}


# -- invalid results -----------------------------------------------------------------------------------------------


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
    "spiky_loss_factor": differs(rejected, R, {**SPIKES, "spike_warmup": 1}, spiky_loss_factor=60.0),
    "max_same_device_reruns": says_how_often_to_try,
}


# -- the whole config ----------------------------------------------------------------------------------------------


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
    assert "a hung rank is not detected (fault_tolerance.enable_ft_package is off)" in scene.log.text
    assert "without effect here: fault_tolerance.max_node_faults (start the script with outlast run)" in scene.log.text


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


CONFIG: dict[str, Proof] = {
    "run_dir": writes_its_journal,
    "checkpoint": lambda scene: _check(scene.saved(total=2), [2]),
    "fault_tolerance": uses_its_timeouts,
    "in_process_restart": has_the_wrappers_settings,
    "health": says_that_nodes_are_not_looked_at,
    "seed": draws_from_its_seed,
}
