"""Hugging Face's Trainer with a session resumes bit-identically, and checks a loss before it trains on it."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import python_blocks, run_python

import outlast
from outlast.checkpoint.catalogue.listing import look_into
from outlast.config import RerunStateMachineConfig
from outlast.errors import ConfigError, ExitReason, NotFinite, OutlastError
from outlast.incidents import EventKind
from outlast.testing import Cluster, RankProcesses

pytestmark = pytest.mark.extended

WITHIN_S = 240.0
VARIANTS = Path(__file__).with_name("hf_variants.py")
NO_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "transformers"


@pytest.fixture(scope="module")
def hf() -> Any:
    """Return the variants; transformers is imported only if tests need it."""
    return importlib.import_module("hf_variants")


# -- resumption ----------------------------------------------------------------------------------------------------


def check_variants(folder: Path, names: list[str], world_size: int) -> None:
    """Run variants on ``world_size`` ranks, and compare their results."""
    alone = [dict.fromkeys(NO_LAUNCHER)] if world_size == 1 else None
    with RankProcesses(VARIANTS, str(folder), *names, world_size=world_size, environments=alone) as ranks:
        codes = ranks.wait(timeout_s=600)
        text = ranks.output(0)
    assert codes == [0] * world_size, text
    for rank in range(world_size):
        results = json.loads((folder / f"rank-{rank}.json").read_text())
        assert list(results) == names
        for name, found in results.items():
            differs = importlib.import_module("hf_variants").VARIANTS[name].get("differs", False)
            assert (found["protected"] != found["unprotected"]) == differs, f"{name}: a session changed the training"
            assert found["resumed"] == found["protected"], f"{name}: the resumed training differs"
            assert found["restarted"] == found["protected"], f"{name}: a restart changed the completed training"
            assert found["steps restarted"] == []
            began = found["steps resumed"][0]
            assert 0 < began <= found["steps interrupted"][-1] + 1, name
            assert found["steps resumed"] == [step for step in found["steps unprotected"] if step >= began], name


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "names",
    [
        ["masked", "epochs", "stopped_early", "injected_nan"],
        ["persistent", "augmented", "augmented_new_workers"],
        ["divided", "stopped_within", "epochs_ended", "epoch_ended_within"],
    ],
    ids=["interrupted", "workers", "ended_early"],
)
def test_resumed_trainer_matches_an_undisturbed_run(tmp_path: Path, names: list[str]) -> None:
    """A training that was interrupted anywhere, draws random numbers in loader workers, or ends early, resumes to
    the weights, logs and best metric of one without outlast."""
    check_variants(tmp_path, names, 1)


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_variants_resume(hf: Any, tmp_path: Path, world_size: int) -> None:
    """All variants resume, on one rank and on two."""
    check_variants(tmp_path, list(hf.VARIANTS), world_size)


# -- faults, under launchers ---------------------------------------------------------------------------------------


def settings(folder: Path, *lines: str) -> str:
    """Write a config file, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    saves = ["[checkpoint]", f'directory = "{folder}/ckpt"', "save_interval = 5"]
    (folder / "outlast.toml").write_text("\n".join([*lines, *saves]))
    return str(folder / "outlast.toml")


def arguments(name: str, folder: Path) -> list[str]:
    """Return the arguments of an example for a training of 40 steps."""
    return ["--output", str(folder / "out"), "--max-steps", "40"] if name == "train.py" else ["--total", "40"]


def plan(folder: Path, fault: str) -> str:
    """Write a plan with one fault of rank 1, and return its setting."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.toml").write_text(
        f'[[faults]]\nname = "fault"\nkind = "{fault}"\nrank = 1\niteration = 27\nsection = "step"\n'
    )
    return f'fault_plan = "{folder}/plan.toml"'


def trained(text: str) -> set[str]:
    """Return the results that the examples printed at their ends."""
    return set(re.findall(r"trained \d+ steps: [0-9a-f]{64}", text))


def run_example(name: str, folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> Cluster:
    """Return the cluster that runs an example on two ranks under ``outlast run``."""
    run_options = ["--max-restarts=3", *options]
    return Cluster(EXAMPLES / name, *arguments, run_dir=folder / "run", num_nodes=1, options=run_options)


def undisturbed(name: str, folder: Path, *arguments: str) -> str:
    """Return the result of an undisturbed example."""
    with run_example(name, folder, "--config", settings(folder), *arguments) as cluster:
        codes, text = cluster.wait(WITHIN_S), cluster.agents[0].output()
    assert codes == [0], text
    (result,) = trained(text)
    return result


def resumed(text: str) -> int:
    """Return the iteration from which the newest restart resumed."""
    return int(re.findall(r"resuming from iteration (\d+)", text)[-1])


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_trainer_survives_a_kill_and_a_preemption_notice(tmp_path: Path) -> None:
    """After SIGTERM at one rank (75) and a SIGKILL in the next job the weights are those of an undisturbed run."""
    own = arguments("train.py", tmp_path)
    expected = undisturbed("train.py", tmp_path / "undisturbed", *own)
    config = settings(tmp_path / "preempted")
    with run_example("train.py", tmp_path / "preempted", "--config", config, *own) as cluster:
        cluster.wait_for(lambda event: event.kind == "save_committed" and (event.iteration or 0) >= 5, WITHIN_S)
        os.kill(cluster.worker_pid(1), signal.SIGTERM)
        codes, text = cluster.wait(WITHIN_S), cluster.agents[0].output()
    assert codes == [ExitReason.PREEMPTED], text
    (left,) = set(re.findall(r"iteration (\d+) is saved, nothing is lost", text))
    assert 5 <= int(left) < 27, text
    config = settings(tmp_path / "preempted", plan(tmp_path / "preempted", "kill"))
    with run_example("train.py", tmp_path / "preempted", "--config", config, *own) as cluster:
        codes, text = cluster.wait(WITHIN_S), cluster.agents[0].output()
    assert codes == [0], text
    assert "rank 1 on node node-0" in text
    assert int(left) <= resumed(text) <= 25
    assert trained(text) == {expected}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["train.py", "accelerate_train.py"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_examples_survive_killed_and_stopped_ranks(tmp_path: Path, name: str, fault: str) -> None:
    """After a SIGKILL or SIGSTOP of a rank the examples end with the weights of an undisturbed run."""
    own = arguments(name, tmp_path)
    expected = undisturbed(name, tmp_path / "undisturbed", *own)
    timeouts = "[fault_tolerance]\nrank_section_timeouts = { step = 8, checkpointing = 30 }"
    config = settings(tmp_path / fault, plan(tmp_path / fault, fault), timeouts)
    with run_example(name, tmp_path / fault, "--config", config, *own) as cluster:
        codes, text = cluster.wait(WITHIN_S), cluster.agents[0].output()
    assert codes == [0], text
    assert 5 <= resumed(text) <= 25
    assert trained(text) == {expected}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["train.py", "accelerate_train.py"])
def test_spare_replaces_a_lost_node(tmp_path: Path, name: str) -> None:
    """After the loss of a node a spare continues; the weights are those of an undisturbed run."""
    own = arguments(name, tmp_path)
    expected = undisturbed(name, tmp_path / "undisturbed", *own)
    config = settings(tmp_path / "lost", plan(tmp_path / "lost", "sleep"))
    with (tmp_path / "lost" / "plan.toml").open("a") as file:
        file.write("duration_s = 100\n")
    nodes: dict[str, Any] = {"num_nodes": 2, "num_spares": 1, "nproc_per_node": 1, "options": ["--max-restarts=3"]}
    with Cluster(EXAMPLES / name, "--config", config, *own, run_dir=tmp_path / "run", **nodes) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.SAVE_COMMITTED and event.iteration == 25, WITHIN_S)
        cluster.agent(next(event.node for event in cluster.events() if event.rank == 1)).kill()
        codes = cluster.wait(WITHIN_S)
        text = "".join(agent.output() for agent in cluster.agents)
    assert sorted(codes) == [-9, 0, 0], text
    assert resumed(text) == 25
    assert trained(text) == {expected}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["train.py", "accelerate_train.py"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_examples_survive_faults_under_torchrun(tmp_path: Path, name: str, fault: str) -> None:
    """Under stock torchrun, where the node's agent ends a stopped rank, the weights are those of an undisturbed run."""
    own = arguments(name, tmp_path)
    expected = undisturbed(name, tmp_path / "undisturbed", *own)
    lines = [
        f'run_dir = "{tmp_path}/run"',
        plan(tmp_path / fault, fault),
        "[fault_tolerance]",
        "rank_section_timeouts = { step = 8, checkpointing = 30 }",
    ]
    config = settings(tmp_path / fault, *lines)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", "--standalone"]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    script = [EXAMPLES / name, "--config", config, *own]
    completed = run_python(*torchrun, "--monitor-interval=0.1", *script, timeout_s=WITHIN_S, **variables)
    assert (tmp_path / "run" / "faults").exists()
    assert trained(completed.stdout) == {expected}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
def test_another_number_of_ranks_resumes_training(tmp_path: Path) -> None:
    """One rank continues the training of two, to the newly set number of steps."""
    own = ["--config", settings(tmp_path), "--output", str(tmp_path / "out"), "--max-steps"]
    with RankProcesses(EXAMPLES / "train.py", *own, "18", world_size=2) as ranks:
        codes, text = ranks.wait(WITHIN_S), ranks.output(0)
    assert codes == [0, 0], text
    alone = [dict.fromkeys(NO_LAUNCHER)]
    with RankProcesses(EXAMPLES / "train.py", *own, "40", world_size=1, environments=alone) as ranks:
        codes, text = ranks.wait(WITHIN_S), ranks.output(0)
    assert codes == [0], text
    assert "loaded iteration 18" in text
    assert "an update takes 8 samples, it took 16: training continues after 18 updates of epoch 0" in text
    assert "trained 40 steps" in text


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
def test_preemption_notice_to_one_rank_ends_both_with_75(tmp_path: Path) -> None:
    """After SIGTERM to rank 1 of two ranks without ``outlast run``, both exit with 75 after the same save."""
    own = ["--config", settings(tmp_path), "--output", str(tmp_path / "out"), "--max-steps", "100000"]
    with RankProcesses(EXAMPLES / "train.py", *own, world_size=2) as ranks:
        ranks.next_line(0, WITHIN_S, containing="'loss':")
        os.kill(ranks.pid(1), signal.SIGTERM)
        codes, text = ranks.wait(WITHIN_S), ranks.output(0)
    assert codes == [ExitReason.PREEMPTED] * 2, text
    (last,) = set(re.findall(r"iteration (\d+) is saved, nothing is lost", text))
    assert {found.entry.iteration for found in look_into(str(tmp_path / "ckpt")).found} >= {int(last)}


# -- checks of the loss --------------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore signal handlers that a session changes."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def nan_trainer(
    hf: Any, folder: Path, *, at: int, permanent: bool = False, accumulation: int = 1, is_divided: bool = False
) -> Any:
    """Return a trainer whose loss is NaN in a step, which with ``is_divided`` spans the end of an epoch and its
    logs."""
    logging = {"logging_strategy": "epoch"} if is_divided else {"logging_steps": 1}
    hf.VARIANTS["nan"] = {
        "args": {"max_steps": 6, "gradient_accumulation_steps": 4 if is_divided else accumulation, **logging},
        "data": hf.Stream if is_divided else hf.Sentences,
        "model": hf.bert,
        "trainer": hf.SometimesNaN,
    }
    trainer = hf.make("nan", folder)
    hf.SometimesNaN.recorded = 0
    trainer.nan_step, trainer.nan_always, trainer.finite = at, permanent, 4 if is_divided else 0
    return trainer


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("accumulation", "is_divided"), [(1, False), (3, False), (1, True)])
def test_transient_nan_step_is_rerun(hf: Any, tmp_path: Path, accumulation: int, is_divided: bool) -> None:
    """The whole step is computed again, also across an epoch's end; weights and logs are those of an undisturbed
    run."""
    finite = nan_trainer(hf, tmp_path / "undisturbed", at=-1, accumulation=accumulation, is_divided=is_divided)
    finite.train()
    faulty = nan_trainer(hf, tmp_path / "faulty", at=3, accumulation=accumulation, is_divided=is_divided)
    hf.protect(faulty, hf.config(tmp_path / "faulty"))
    faulty.train()
    assert hf.SometimesNaN.recorded == 1
    assert hf.outcome(faulty)["weights"] == hf.outcome(finite)["weights"]
    expected = [one["loss"] for one in finite.state.log_history if "loss" in one]
    assert len(expected) == 6 or not is_divided
    assert [one["loss"] for one in faulty.state.log_history if "loss" in one] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("signals")
def test_evaluation_within_a_step_has_its_own_section(hf: Any, tmp_path: Path) -> None:
    """An evaluation within an accumulation is timed as evaluation only."""
    args = {"max_steps": 2, "gradient_accumulation_steps": 4, "eval_strategy": "epoch"}
    hf.VARIANTS["evaluated"] = {"args": args, "data": hf.Stream}
    sections = hf.OpenSections()
    hf.protect(hf.make("evaluated", tmp_path, sections), hf.config(tmp_path)).train()
    assert sections.recorded == [*[["step"]] * 6, ["evaluation"], *[["step"]] * 3, ["evaluation"]]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("is_divided", "position"), [(False, (0, 3)), (True, (2, 1))])
def test_persistent_nan_exits_16_without_an_update(
    hf: Any, tmp_path: Path, is_divided: bool, position: tuple[int, int]
) -> None:
    """A loss that is NaN again ends all ranks with 16 before the optimizer steps; the state at the start of the
    step, which the end of an epoch may divide, is saved separately for a diagnosis."""
    trainer = nan_trainer(hf, tmp_path, at=3, permanent=True, is_divided=is_divided)
    hf.protect(trainer, hf.config(tmp_path))
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == ExitReason.RESUME_TO_DISAMBIGUATE
    hf.end_process(trainer)
    saved = trainer.train.__self__.state_dict()
    assert (saved["epoch"], saved["updates"]) == position
    assert trainer.state.global_step == 3
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())
    assert (tmp_path / "ckpt" / "suspect").is_dir()


@pytest.mark.usefixtures("signals")
def test_training_ended_within_a_step_is_saved_as_finished(hf: Any, tmp_path: Path) -> None:
    """A training that a callback ends between two micro-batches is saved as finished."""
    unprotected = hf.make("accumulation", tmp_path / "bare", hf.EndEarly(training_within=9))
    unprotected.train()
    protected = hf.make("accumulation", tmp_path / "protected", hf.EndEarly(training_within=9))
    hf.protect(protected, hf.config(tmp_path / "protected")).train()
    assert protected.state.global_step == unprotected.state.global_step == 9
    assert hf.outcome(protected)["weights"] == hf.outcome(unprotected)["weights"]
    found = [one.entry.iteration for one in look_into(str(tmp_path / "protected" / "ckpt")).found]
    assert max(found) >= 9


@pytest.mark.usefixtures("signals")
def test_disabled_checks_train_on_nan_and_report_it_once(
    hf: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With all checks off NaN is trained on and reported once, and NaN weights at the end are an error."""
    trainer = nan_trainer(hf, tmp_path, at=3, permanent=True)
    off = RerunStateMachineConfig(rerun_mode="disabled", check_for_nan_in_loss=False)
    hf.protect(trainer, hf.config(tmp_path, rerun_state_machine=off))
    step = trainer.training_step
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == ExitReason.FAILED_VALIDATION
    assert trainer.training_step == step
    assert not all(torch.isfinite(weight).all() for weight in trainer.model.parameters())
    assert caplog.text.count("grad_norm is nan at step 4, and training continues with it") == 1
    hf.end_process(trainer)


@pytest.mark.usefixtures("signals")
def test_nan_loss_raises_with_reruns_disabled(hf: Any, tmp_path: Path) -> None:
    """With rerun_mode disabled a NaN loss raises before an update."""
    trainer = nan_trainer(hf, tmp_path, at=3, permanent=True)
    hf.protect(trainer, hf.config(tmp_path, rerun_state_machine=RerunStateMachineConfig(rerun_mode="disabled")))
    with pytest.raises(NotFinite, match="rerun_mode='disabled' runs no step again"):
        trainer.train()
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


# -- unchanged and rejected trainers -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("signals")
def test_trainer_is_restored_after_train(hf: Any, tmp_path: Path) -> None:
    """Evaluation alone opens no session, and after train() the trainer's methods and callbacks are its own."""
    trainer = hf.make("plain", tmp_path)
    callbacks, methods = list(trainer.callback_handler.callbacks), {*vars(trainer)}
    assert hf.protect(trainer, hf.config(tmp_path / "one")) is trainer
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(hf.Sentences(4)).predictions.shape[0] == 4
    assert not (tmp_path / "one").exists()
    trainer.train()
    logged = [one for one in trainer.state.log_history if "loss" in one]
    assert all(one["outlast/step_time_s"] > 0 and one["outlast/restart_count"] == 0 for one in logged)
    assert any("outlast/save_stall_s" in one for one in logged)
    assert trainer.callback_handler.callbacks == callbacks
    assert not {"evaluate", "log", "training_step", "_run_epoch"} & ({*vars(trainer)} - methods)
    with pytest.raises(ConfigError, match="call protect\\(\\) again, with another"):
        trainer.train()
    hf.protect(trainer, hf.config(tmp_path / "two"))
    assert trainer.train().global_step == 11
    assert (tmp_path / "two" / "ckpt").is_dir()


@pytest.mark.slow
@pytest.mark.usefixtures("signals")
def test_resume_from_checkpoint_starts_a_protected_run(hf: Any, tmp_path: Path) -> None:
    """resume_from_checkpoint is used only while the run has no checkpoint."""
    args = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    hf.VARIANTS["own_saves"] = {"args": args, "model": hf.bert}
    unprotected = hf.make("own_saves", tmp_path)
    unprotected.train()
    folder = str(tmp_path / "out" / "checkpoint-4")
    recorded = hf.Interrupt(7)
    continued = hf.protect(hf.make("own_saves", tmp_path, recorded), hf.config(tmp_path))
    with pytest.raises(InterruptedError):
        continued.train(resume_from_checkpoint=folder)
    assert recorded.began == [4, 5, 6, 7]
    hf.end_process(continued)
    recorded = hf.Interrupt(None)
    resumed = hf.protect(hf.make("own_saves", tmp_path, recorded), hf.config(tmp_path))
    resumed.train(resume_from_checkpoint=folder)
    assert recorded.began == [6, 7]
    assert hf.outcome(resumed)["weights"] == hf.outcome(unprotected)["weights"]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.usefixtures("signals")
def test_documented_code_runs(hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of the page runs, on a small model."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(python_blocks("transformers.md")):
        settings(tmp_path / str(number))
        os.chdir(tmp_path / str(number))
        made = hf.make("model_init", tmp_path / str(number))
        names = {"Trainer": hf.Trainer, "model": made.model, "args": made.args, "dataset": hf.Sentences()}
        names["optimizer"] = torch.optim.AdamW(made.model.parameters())
        names["schedule"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
        exec(compile(block.replace("/shared", str(tmp_path)), f"block {number}", "exec"), names)
        match number:
            case 0:
                assert names["trainer"].state.global_step == 8
            case 1:
                assert names["trainer"].train().global_step == 8
                assert (tmp_path / "run-42").is_dir()
            case 2:
                assert names["run"].iteration == 100
            case _:
                pytest.fail("the page has a block that this test does not know")
    (block,) = [one for one in python_blocks("../README.md") if "protect(trainer" in one]
    settings(tmp_path / "readme")
    os.chdir(tmp_path / "readme")
    trainer = hf.make("model_init", tmp_path / "readme")
    exec(compile(block, "README.md", "exec"), {"trainer": trainer})
    assert trainer.state.global_step == 8


@pytest.mark.usefixtures("signals")
def test_metrics_without_a_json_form_are_saved_as_text(hf: Any, tmp_path: Path) -> None:
    """Dates and keys that are not strings prevent neither a save nor a resumption."""
    metrics = {"day": datetime.date(2026, 1, 2), "seen": {(0, 1): 3, 2: np.float32(0.5)}, "at": [np.int64(4)]}
    hf.VARIANTS["dated"] = {"args": {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}}
    for after in (2, None):
        trainer = hf.protect(hf.make("dated", tmp_path, hf.Interrupt(after)), hf.config(tmp_path))
        trainer.compute_metrics = lambda _: metrics
        if after is not None:
            with pytest.raises(InterruptedError):
                trainer.train()
            hf.end_process(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    first = trainer.state.log_history[0]
    assert first["eval_day"] == "2026-01-02"
    assert first["eval_seen"] == {"(0, 1)": 3, "2": 0.5}


@pytest.mark.usefixtures("signals")
def test_callback_without_a_json_state_is_reported(hf: Any, tmp_path: Path) -> None:
    """A callback whose state JSON cannot represent is an error that contains its name."""
    trainer = hf.protect(hf.make("plain", tmp_path, hf.DateState()), hf.config(tmp_path))
    with pytest.raises(OutlastError, match="the callback DateState cannot be saved"):
        trainer.train()
    hf.end_process(trainer)


def test_unsupported_trainers_are_rejected_by_name(hf: Any, tmp_path: Path) -> None:
    """Each error is a one-line ConfigError with the remedy, before anything is opened."""

    def error_of(trainer: Any, config: Any = None) -> str:
        with pytest.raises(ConfigError) as caught:
            hf.protect(trainer, config)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    trainer = hf.make("plain", tmp_path)
    assert "takes a transformers.Trainer, not str" in error_of("trainer")
    assert "takes an outlast.Config or the path of a config file, not int" in error_of(trainer, 3)
    for name, value, text in (
        ("enable_jit_checkpoint", True, "leave it off"),
        ("auto_find_batch_size", True, "set per_device_train_batch_size"),
    ):
        setattr(trainer.args, name, value)
        assert text in error_of(trainer)
        setattr(trainer.args, name, False)
    for name, text in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        setattr(trainer, name, True)
        assert text in error_of(trainer)
        setattr(trainer, name, False)
    trainer._run_epoch = None
    assert "has no Trainer._run_epoch" in error_of(trainer)
    del trainer._run_epoch
    hf.protect(trainer, outlast.Config())
    assert "protected already" in error_of(trainer)
    trainer.hp_search_backend = "optuna"
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        trainer.train()


TWO = """
import os, sys, torch, transformers
import outlast
from outlast.integrations.transformers import protect

folder, cycle = sys.argv[1], os.environ["OUTLAST_CYCLE"]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, rows, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(rows), labels)}

class Killed(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        print(name, "cycle", cycle, "step", state.global_step, flush=True)
        if (name, cycle, state.global_step) == ("second", "0", 6):
            os.kill(os.getpid(), 9)

drawn = torch.Generator().manual_seed(0)
examples = [{"rows": torch.randn(4, generator=drawn), "labels": torch.zeros(1)} for _ in range(64)]
for name in ("first", "second"):
    args = transformers.TrainingArguments(
        f"{folder}/out", max_steps=8, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(Model(), args, train_dataset=examples, callbacks=[Killed()])
    saves = outlast.CheckpointConfig(directory=f"{folder}/{name}", save_interval=2, async_save=False)
    protect(trainer, outlast.Config(checkpoint=saves)).train()
    print(name, "ended with", trainer.model.layer.weight.detach().tolist(), flush=True)
"""


@pytest.mark.campaign
@pytest.mark.process
def test_two_protected_trainings_of_a_process_are_separate(tmp_path: Path) -> None:
    """Of two protected trainings the second starts at 0, and resumes from its own checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(TWO)
    with Cluster(script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        codes = cluster.wait(240.0)
        text = cluster.agents[0].output()
    assert codes == [0], text
    begins = [line.split() for line in text.splitlines() if line.startswith("second cycle")]
    assert [(one[2], one[4]) for one in begins] == [*(("0", str(at)) for at in range(7)), ("1", "6"), ("1", "7")], text
    weights = {line.partition("ended with ")[2] for line in text.splitlines() if "ended with [" in line}
    assert len(weights) == 1, text
