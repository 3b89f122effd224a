"""Lightning's Trainer with outlast's callbacks: killed, stopped and signalled runs resume bit-identically."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from gated_training import Launch, launched
from pages import python_blocks, run_python

import outlast
from outlast.checkpoint.catalogue.listing import look_into
from outlast.config import ReplicaDigestConfig
from outlast.errors import ConfigError, ExitReason
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.testing import Cluster


class _LazyModule:
    """A module that is imported on first use: every pytest process collects this file, and one runs it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest inspects all attributes of a module
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


pl: Any = _LazyModule("lightning.pytorch")
adapter: Any = _LazyModule("outlast.integrations.lightning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning" / "train.py"
POSITIONS = Path(__file__).with_name("lightning_positions.py")
WITHIN_S = 240.0
STEPS = 24
pytestmark = pytest.mark.filterwarnings("ignore")


def config(folder: Path, **others: Any) -> outlast.Config:
    return outlast.Config(checkpoint=outlast.CheckpointConfig(directory=str(folder / "ckpt")), **others)


def digests(text: str) -> list[str]:
    """Return the digests that the example printed at its end, one for each rank."""
    return re.findall(rf"trained {STEPS} steps: ([0-9a-f]{{64}})", text)


def run_example(folder: Path, *faults: str, options: tuple[str, ...] = ()) -> tuple[str, str]:
    """Run the example with two ranks under ``outlast run``; return the digest of its weights, and the log."""
    folder.mkdir()
    arguments: list[str] = []
    if faults:
        (folder / "plan.toml").write_text("\n".join(faults))
        arguments = ["--plan", str(folder / "plan.toml")]
    launch = ["--max-restarts=3", *options]
    with Cluster(EXAMPLE, str(folder), *arguments, run_dir=folder / "run", num_nodes=1, options=launch) as cluster:
        codes = cluster.wait(WITHIN_S)
        text = cluster.agents[0].output()
    assert codes == [0], text
    found = digests(text)
    assert len(found) == 2, text
    assert len(set(found)) == 1
    return found[0], text


def fault(kind: str, after: int) -> str:
    """Return the TOML of a fault of rank 1."""
    return f'[[faults]]\nname = "{kind}"\nkind = "{kind}"\nrank = 1\niteration = {after}'


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights of an undisturbed run of the example."""
    digest, text = run_example(tmp_path_factory.mktemp("lightning") / "undisturbed")
    assert "cycle 1" not in text
    return digest


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_killed_rank_resumes_from_the_newest_checkpoint(tmp_path: Path, undisturbed: str) -> None:
    """After a SIGKILL within an epoch the run resumes from the newest checkpoint, and ends with the same weights."""
    digest, text = run_example(tmp_path / "killed", fault("kill", 10))
    (begin,) = re.findall(r"loaded iteration (\d+) in", text)
    assert int(begin) in (4, 8), text
    assert digest == undisturbed


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(600)
def test_stopped_rank_is_detected_and_replaced(tmp_path: Path, undisturbed: str) -> None:
    """After a SIGSTOP the timeout of section step ends the cycle and identifies the rank; the weights are the same."""
    options = ("--ft-rank_section_timeouts=setup:120,step:5,checkpointing:60",)
    digest, text = run_example(tmp_path / "stopped", fault("stop", 10), options=options)
    assert re.search(r"cycle 0 ended: rank 1 .* hangs in section 'step'", text), text
    assert digest == undisturbed


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(600)
def test_spare_replaces_a_lost_node(tmp_path: Path, undisturbed: str) -> None:
    """After the loss of a node within an epoch a spare continues; the weights are the same."""
    (tmp_path / "plan.toml").write_text(fault("sleep", 10) + "\nduration_s = 100\n")
    arguments = [str(tmp_path), "--plan", str(tmp_path / "plan.toml")]
    nodes: dict[str, Any] = {"num_nodes": 2, "num_spares": 1, "nproc_per_node": 1, "options": ["--max-restarts=3"]}
    with Cluster(EXAMPLE, *arguments, run_dir=tmp_path / "run", **nodes) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.SAVE_COMMITTED and event.iteration == 8, WITHIN_S)
        cluster.agent(next(event.node for event in cluster.events() if event.rank == 1)).kill()
        codes = cluster.wait(WITHIN_S)
        text = "".join(agent.output() for agent in cluster.agents)
    assert sorted(codes) == [-9, 0, 0], text
    assert re.findall(r"loaded iteration (\d+) in", text)[0] == "8", text
    assert set(digests(text)) == {undisturbed}


def events_of(folder: Path, kind: EventKind) -> list[Any]:
    """Return the events of a kind in the journal of a run."""
    return [event for event in read(folder / "run") if event.kind == kind]


def torchrun(folder: Path) -> AbstractContextManager[Launch]:
    """Run the example under stock torchrun, which restarts nothing."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
    return launched(folder, *command, str(folder), "--size", "2048", "--epochs", "1", PYTHONUNBUFFERED="1")


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_under_torchrun_loses_no_saved_step(tmp_path: Path, number: signal.Signals) -> None:
    """Under stock torchrun, SIGTERM at one rank saves the same step on both (75) and SIGKILL keeps committed saves;
    the next start ends with the same weights."""
    trained = re.compile(r"trained \d+ steps: ([0-9a-f]{64})")
    with torchrun(tmp_path / "undisturbed") as undisturbed_run:
        assert undisturbed_run.process.wait(WITHIN_S) == 0, undisturbed_run.process.tail(80)
        (expected,) = set(trained.findall(undisturbed_run.process.output()))
    folder = tmp_path / "signalled"
    with torchrun(folder) as run:
        run.wait_until(lambda: events_of(folder, EventKind.SAVE_COMMITTED), WITHIN_S)
        pids = {event.rank: int(event.data["pid"]) for event in events_of(folder, EventKind.SESSION_STARTED)}
        os.kill(pids[1], number)
        assert run.process.wait(WITHIN_S) == 1, run.process.tail(80)
        saved = max(found.entry.iteration for found in look_into(str(folder / "ckpt")).found)
        if number == signal.SIGTERM:
            assert "Preemption detected, saving checkpoint and exiting" in run.process.output()
            ended = events_of(folder, EventKind.SESSION_ENDED)
            assert [event.data["exit_code"] for event in ended] == [75, 75]
            assert {event.iteration for event in ended} == {saved}
    with torchrun(folder) as restarted:
        assert restarted.process.wait(WITHIN_S) == 0, restarted.process.tail(80)
        text = restarted.process.output()
    assert f"loaded iteration {saved} " in text
    assert set(trained.findall(text)) == {expected}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(600)
def test_preemption_notice_to_one_rank_ends_the_job_with_75(tmp_path: Path) -> None:
    """After SIGTERM to rank 1's process, all ranks save the same step, the job exits with 75, and no step is lost."""
    with Cluster(EXAMPLE, str(tmp_path), "--size", "20000", run_dir=tmp_path / "run", num_nodes=1) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.SAVE_COMMITTED, WITHIN_S)
        os.kill(cluster.worker_pid(1), signal.SIGTERM)
        codes = cluster.wait(WITHIN_S)
        text = cluster.agents[0].output()
    assert codes == [ExitReason.PREEMPTED], text
    assert "Preemption detected, saving checkpoint and exiting" in text
    (last,) = re.findall(r"stopping after iteration (\d+), on all ranks", text)
    assert f"iteration {last} is saved, nothing is lost; exiting with code 75" in text
    assert max(found.entry.iteration for found in look_into(str(tmp_path / "ckpt")).found) == int(last)


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_skips_no_sample(tmp_path: Path, before: int, after: int) -> None:
    """A run that exits within an epoch is completed by another number of ranks, which repeat at most a batch."""
    run = {"run_dir": tmp_path / "run", "num_nodes": 1}
    arguments = [str(tmp_path), "--size", "160", "--epochs", "1", "--accumulate", "1"]
    (tmp_path / "plan.toml").write_text(fault("sleep", 7).replace("rank = 1", "rank = 0") + "\nduration_s = 15\n")
    with Cluster(EXAMPLE, *arguments, "--plan", str(tmp_path / "plan.toml"), nproc_per_node=before, **run) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.FAULT_SIMULATED, WITHIN_S)
        os.kill(cluster.worker_pid(0), signal.SIGTERM)
        assert cluster.wait(WITHIN_S) == [ExitReason.PREEMPTED], cluster.agents[0].output()
        (stopped_at,) = map(int, re.findall(r"stopping after iteration (\d+), on all", cluster.agents[0].output()))
    with Cluster(EXAMPLE, *arguments, nproc_per_node=after, **run) as cluster:
        assert cluster.wait(WITHIN_S) == [0], cluster.agents[0].output()
        text = cluster.agents[0].output()
    assert f"{before} ranks did what {after} do now" in text
    rest = 40 // after - stopped_at * before // after
    assert re.findall(r"trained (\d+) steps", text) == [str(stopped_at + rest)] * after, text


@pytest.mark.process
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "every", "steps", "num_saved"),
    [
        pytest.param("validations", 5, 12, 12, marks=[pytest.mark.extended, pytest.mark.slow]),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in [
                *(("epochs", 1, 18, 18), ("steps", 1, 15, 15), ("validations", 1, 12, 12), ("accumulation", 1, 9, 9)),
                *(("validations-steps", 1, 15, 15), ("manual", 1, 24, 12), ("no-validation", 1, 18, 18)),
                *(
                    ("stateful", 1, 18, 18),
                    ("averaging", 1, 24, 24),
                    ("scheduled", 1, 12, 12),
                    ("finetuned", 1, 24, 24),
                ),
            ]
        ),
    ],
)
def test_run_resumes_exactly_from_every_step(tmp_path: Path, case: str, every: int, steps: int, num_saved: int) -> None:
    """A killed or signalled run resumes exactly, for all kinds of loops, loaders and callbacks: hooks, validations
    and ends of epochs are neither skipped nor repeated."""
    command = [POSITIONS, tmp_path, case, str(every)]
    printed = run_python(*command, timeout_s=1500, OUTLAST_LOG_LEVEL="error").stdout
    assert printed == f"{case} {steps} steps, {num_saved} generations\n"


# -- settings and errors, without training ----------------------------------------------------------------------------


def make_trainer(*callbacks: Any, **options: Any) -> Any:
    """Return a trainer for one process."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **options}, callbacks=list(callbacks))


def finder(name: str) -> Any:
    """Return one of Lightning's callbacks that search for a setting."""
    return getattr(importlib.import_module("lightning.pytorch.callbacks"), name)()


def settings(trainer: Any) -> outlast.Config:
    """Return the merged settings of a trainer's callbacks."""
    hosted = [callback for callback in trainer.callbacks if hasattr(callback, "session")]
    made: outlast.Config = adapter.merge_settings(trainer, hosted)[0]
    return made


def protect(*callbacks: Any, **options: Any) -> None:
    """Open the session of a trainer as ``fit()`` does."""
    protection = adapter.FaultToleranceCallback()
    protection.setup(make_trainer(protection, *callbacks, **options), None, "fit")


def test_invalid_settings_are_rejected_with_the_remedy(tmp_path: Path) -> None:
    """Each error is one line with the fault and the remedy."""
    rejected: list[tuple[Any, str]] = [
        (
            lambda: settings(make_trainer(adapter.FaultToleranceCallback(trainer_saves=False))),
            "trainer_saves=False.* has nowhere to save to",
        ),
        (
            lambda: adapter.FaultToleranceCallback(autoresume=False, trainer_saves=False),
            "trainer_saves=False has no effect with autoresume=False",
        ),
        (lambda: adapter.PreemptionCallback(sig=4000), "sig=4000 is not a signal"),
        (lambda: adapter.PreemptionCallback(sig=signal.SIGKILL), "SIGKILL"),
        (adapter.LocalCheckpointCallback, "every_n_train_steps or train_time_interval"),
        (lambda: adapter.LocalCheckpointCallback(0), "every_n_train_steps=0"),
        (lambda: adapter.LocalCheckpointCallback(train_time_interval=timedelta(0)), "train_time_interval"),
        (
            lambda: adapter.StragglerDetectionCallback(calc_relative_gpu_perf=False, calc_individual_gpu_perf=False),
            "calc",
        ),
        (lambda: adapter.StragglerDetectionCallback(gpu_relative_perf_threshold=7.0), "gpu_relative_perf_threshold"),
        (lambda: adapter.FaultToleranceCallback(simulated_fault_params={"fault_typ": "random"}), "fault_type"),
        (lambda: adapter.FaultToleranceCallback(simulated_fault_params={"fault_type": "random"}), "base_delay"),
        (lambda: adapter.update_trainer_local_checkpoint_io(make_trainer(), tmp_path, replicaton=True), "replication"),
        (lambda: adapter.HierarchicalCheckpointIO(None, object(), int), "takes a LocalTier, or a manager"),  # type: ignore[arg-type]
        (
            lambda: settings(
                make_trainer(
                    adapter.FaultToleranceCallback(config=config(tmp_path)),
                    adapter.PreemptionCallback(config=config(tmp_path, seed=1)),
                )
            ),
            "different config=",
        ),
        (lambda: protect(strategy="ddp_spawn", devices=2), "DDPStrategy starts its ranks by"),
        (lambda: protect(strategy="ddp", devices=2), "itself started the 2 ranks.* outlast run"),
        (lambda: protect(finder("LearningRateFinder")), "LearningRateFinder repeats its search.*Tuner"),
        (lambda: protect(finder("BatchSizeFinder")), "BatchSizeFinder repeats its search.*Tuner"),
    ]
    for call, message in rejected:
        with pytest.raises(ConfigError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_sharded_state_is_not_saved_by_the_session(tmp_path: Path) -> None:
    """A strategy that shards its state is rejected with a checkpoint directory; without one, or on request, the
    trainer saves."""

    class FSDPStrategy:
        """Substitute for Lightning's class, which needs a GPU."""

        checkpoint_io = None

    def merged(**options: Any) -> Any:
        callback = adapter.FaultToleranceCallback(**options)
        trainer = types.SimpleNamespace(strategy=FSDPStrategy(), callbacks=[callback])
        return adapter.merge_settings(trainer, trainer.callbacks)

    save_directory = re.escape(str(tmp_path / "ckpt"))
    with pytest.raises(
        ConfigError, match=f"^checkpoint.directory='{save_directory}'.* FSDPStrategy: .* use strategy='ddp'"
    ):
        merged(config=config(tmp_path))
    with pytest.raises(ConfigError, match=r"^strategy FSDPStrategy: .* whole on each rank"):
        merged(trainer_saves=False)
    with pytest.raises(ConfigError, match=r"differ with FSDPStrategy; remove \[replica_digest\]"):
        merged(config=outlast.Config(replica_digest=ReplicaDigestConfig()))
    assert merged()[1] == "FSDPStrategy shards its state"
    for options in ({"trainer_saves": True}, {"autoresume": False}):
        made, why = merged(config=config(tmp_path), **options)
        assert made.checkpoint is None
        assert why == "as requested"


def test_without_a_directory_the_trainer_saves(caplog: pytest.LogCaptureFixture) -> None:
    """Each callback works without settings; impossible local checkpoints are a WARNING with the remedy."""
    callbacks = [
        adapter.FaultToleranceCallback(),
        adapter.PreemptionCallback(),
        adapter.straggler_det_callback(),
        adapter.LocalCheckpointCallback(every_n_train_steps=10),
    ]
    for callback in callbacks:
        made, why = adapter.merge_settings(make_trainer(callback), [callback])
        assert (made.checkpoint, why) == (None, "no checkpoint.directory is known")
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("outlast")]
    assert "saves nothing: call update_trainer_local_checkpoint_io(" in warning
    found = settings(make_trainer(callbacks[2])).straggler_detection
    assert found is not None
    assert (found.enabled, found.report_time_interval, found.stop_if_detected) == (True, 300, True)


def test_settings_of_all_callbacks_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of all callbacks are merged into one config; other settings of the user are kept."""
    monkeypatch.delenv("OUTLAST_RUN_DIR", raising=False)
    trainer = make_trainer(
        adapter.FaultToleranceSectionsCallback(
            simulated_fault_params=adapter.SimulatedFaultParams("rank_killed", 3.0, rank_to_fail=1),
            exp_dir=tmp_path / "exp",
            calculate_timeout=True,
        ),
        adapter.PreemptionCallback(signal.SIGUSR2, config=config(tmp_path, seed=5)),
        adapter.StragglerDetectionCallback(stop_if_detected=True),
        adapter.LocalCheckpointCallback(every_n_train_steps=7),
    )
    adapter.update_trainer_local_checkpoint_io(trainer, tmp_path / "fast", replication=False)
    made = settings(trainer)
    assert made.seed == 5
    assert made.run_dir == str(tmp_path / "exp")
    assert made.fault_tolerance is not None
    assert made.fault_tolerance.given == {
        "calc_ft_timeouts": True,
        "simulate_fault": True,
        "simulated_fault_type": "rank_killed",
        "simulated_fault_rank": 1,
        "simulated_fault_base_delay": 3.0,
    }
    assert made.preemption is not None
    assert made.preemption.exit_signal == "SIGUSR2"
    found = made.straggler_detection
    assert found is not None
    assert (found.gpu_relative_perf_threshold, found.gpu_individual_perf_threshold) == (0.7, 0.7)
    assert found.report_time_interval == 300.0
    assert (found.num_gpu_perf_scores_to_print, found.stop_if_detected, found.confirmations) == (5, True, 1)
    assert made.checkpoint is not None
    assert made.checkpoint.local_directory == str(tmp_path / "fast" / "local_ckpt")
    assert (made.checkpoint.non_persistent_save_interval, made.checkpoint.replication) == (7, False)
    assert not made.checkpoint.async_save  # like the global save


def test_straggler_settings_of_the_user_are_kept(tmp_path: Path) -> None:
    """Only parameters of the callback other than the defaults change the user's settings."""
    detection = outlast.StragglerDetectionConfig(
        report_time_interval=60, confirmations=3, stop_if_detected=True, num_gpu_perf_scores_to_print=0
    )
    callback = adapter.StragglerDetectionCallback(
        num_gpu_perf_scores_to_print=2, config=config(tmp_path, straggler_detection=detection)
    )
    found = settings(make_trainer(callback)).straggler_detection
    assert found is not None
    assert (found.enabled, found.report_time_interval, found.confirmations) == (True, 60, 3)
    assert (found.stop_if_detected, found.num_gpu_perf_scores_to_print) == (True, 2)


def test_sampler_follows_torchs_order_from_any_position() -> None:
    """The sampler yields DistributedSampler's indices from any position, then whole epochs, and saves its position."""
    from torch.utils.data.distributed import DistributedSampler

    data = range(23)
    for rank in range(3):
        plain = DistributedSampler(data, 3, rank, seed=4)  # type: ignore[arg-type]
        sampler = adapter.ResumableDistributedSampler(data, 3, rank, seed=4)
        for epoch in (0, 1):
            plain.set_epoch(epoch)
            sampler.set_epoch(epoch)
            assert list(sampler) == list(plain)
        iterator: Iterator[int] = iter(sampler)
        first = [next(iterator) for _ in range(3)]
        other = adapter.ResumableDistributedSampler(data, 3, rank)
        other.load_state_dict(sampler.state_dict())
        assert first + list(other) == list(plain)
        assert list(other) == list(plain)
        assert len(other) == len(plain)


def test_sampler_works_without_a_process_group() -> None:
    """The sampler works without torch.distributed."""
    assert sorted(adapter.ResumableDistributedSampler(range(7))) == [*range(7)]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_documented_code_runs(tmp_path: Path) -> None:
    """Every Python block of docs/lightning.md runs, and further promises of the page hold in the same process."""
    blocks = python_blocks("lightning.md")
    names = ["trainer.fit(", "StragglerDetectionCallback(report", "own = ModelCheckpoint(", "update_trainer_local"]
    names += ["sampler=Resum", "Stateful"]
    assert len(blocks) == len(names)
    for block, name in zip(blocks, names, strict=True):
        assert name in block
    (tmp_path / "outlast.toml").write_text('[checkpoint]\ndirectory = "ckpt"\nsave_interval = 2\n')
    body = [
        blocks[4],
        blocks[5].replace("train_loader", "stateful_loader"),
        blocks[0].replace('strategy="ddp", accelerator="cpu", devices=2', 'accelerator="cpu", devices=1'),
        blocks[1],
        blocks[2],
        MONITORED,
        blocks[3],
    ]
    script = PRELUDE + "\n".join(body) + CODA + LOCAL
    result = run_python("-c", script, cwd=tmp_path)
    assert "checked local checkpoints and scores" in result.stdout


@pytest.mark.campaign
@pytest.mark.process
def test_readme_code_runs(tmp_path: Path) -> None:
    """The README's lines for Lightning train and save."""
    (block,) = [one for one in python_blocks("../README.md") if "pl.Trainer" in one]
    alone = block.replace('strategy="ddp"', 'accelerator="cpu", devices=1, max_epochs=1, logger=False')
    assert alone != block
    (tmp_path / "outlast.toml").write_text('[checkpoint]\ndirectory = "ckpt"\nsave_interval = 2\n')
    script = PRELUDE + alone + "trainer.fit(model, val_loader)\nprint(trainer.global_step)\n"
    result = run_python("-c", script, cwd=tmp_path)
    iterations = [found.entry.iteration for found in look_into(str(tmp_path / "ckpt")).found]
    assert max(iterations) == int(result.stdout.splitlines()[-1]) > 0


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_lightnings_own_decisions_are_kept(tmp_path: Path) -> None:
    """Early stopping, fast_dev_run, other signals, validations within accumulation and a second ``fit()`` behave as
    in Lightning."""
    result = run_python("-c", PRELUDE + BY_ITSELF, cwd=tmp_path)
    assert "stopped early at 6, 6" in result.stdout
    assert "caught, then 9" in result.stdout
    assert not (tmp_path / "tried").exists()


PRELUDE = """
import logging
import os
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
import outlast
from outlast.integrations.lightning import *
from outlast.integrations.lightning import get_iteration_from_checkpoint

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
        self.bad = False
    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        return loss * float("nan") if self.bad and index == 2 else loss
    def validation_step(self, batch, index):
        self.net(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

dataset = torch.ones(24, 3)
model = Model()
val_loader = DataLoader(torch.ones(4, 3))
folder = "fast"
config = outlast.Config(checkpoint=outlast.CheckpointConfig(directory="other"))
os.environ["FAULT_TOL_FINISHED_FLAG_FILE"] = "finished"
"""
MONITORED = """
assert os.path.exists("checkpoints/last.ckpt") and trainer.global_step == 6, trainer.global_step
"""
BY_ITSELF = """
import signal
from lightning.pytorch.callbacks import Callback
from outlast.monitor.rank_monitor import open_monitor

def train(*others, directory, sig=None, **options):
    config = outlast.Config(checkpoint=outlast.CheckpointConfig(directory=directory, save_interval=2))
    callbacks = [*others, FaultToleranceCallback(config=config), PreemptionCallback(sig)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=callbacks, **options,
    )
    trainer.fit(Model(), DataLoader(dataset, batch_size=8), val_loader)
    return trainer.global_step

class Stop(Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = trainer.current_epoch == 1

steps = [train(Stop(), directory="early", max_epochs=9) for _ in range(2)]
print(f"stopped early at {steps[0]}, {steps[1]}")

class Look(Callback):
    handlers, inside = [], set()
    def on_train_batch_start(self, *_):
        self.handlers.append(signal.getsignal(signal.SIGTERM))
    def on_validation_batch_start(self, trainer, *_):
        if not trainer.sanity_checking:
            self.inside.add(len(open_monitor().page._stack))  # its own section, and not the step's around it

before = signal.getsignal(signal.SIGTERM)
train(Look(), directory="usr", sig=signal.SIGUSR1, max_epochs=1, accumulate_grad_batches=2, val_check_interval=1)
assert set(Look.handlers) == {before}, Look.handlers
assert Look.inside == {1}, Look.inside
train(directory="tried", fast_dev_run=True)

class Raise(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 4:
            raise ValueError("of the script")

try:
    train(Raise(), directory="caught", max_epochs=3)
except ValueError:
    print(f"caught, then {train(directory='caught', max_epochs=3)}")
"""
CODA = """
import pathlib
assert pathlib.Path("finished").exists()
assert "step-18" in os.listdir("ckpt"), os.listdir("ckpt")  # of earlier saves a newer one may have taken the place
assert trainer.callbacks[0].session is None
saved = []
trainer.callbacks.append(type("Seen", (pl.Callback,), {"on_fit_end": lambda self, trainer, module: saved.append(
    list(pathlib.Path("fast/local_ckpt").glob("*")))})())
trainer.fit(model, train_loader)
assert saved[0] and trainer.global_step == 6

# A plain checkpoint of Lightning's tells its step, validate() opens no session, fit() again goes on.
trainer.save_checkpoint("plain.ckpt")
assert get_iteration_from_checkpoint("plain.ckpt") == 6
trainer.validate(model, val_loader, verbose=False)
trainer.fit_loop.max_epochs = 2
trainer.fit(model, train_loader)
assert trainer.global_step == 12, trainer.global_step
# NaN moves no weight.
bad = Model()
bad.bad = True
before = None
class Keep(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        global before
        before = module.net.weight.clone()
def fit_unlucky(model, folder, **rerun):
    own = outlast.Config(checkpoint=outlast.CheckpointConfig(directory=folder, save_interval=1),
                         rerun_state_machine=outlast.RerunStateMachineConfig(**rerun))
    unlucky = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                         callbacks=[FaultToleranceCallback(config=own), Keep()])
    unlucky.fit(model, train_loader)
for mode in ("disabled", "validate_results"):
    try:
        fit_unlucky(bad, mode, rerun_mode=mode)
    except outlast.OutlastError as error:
        assert "the loss of step 3 is nan on rank 0" in str(error), error
        assert torch.equal(before, bad.net.weight)
        assert not pathlib.Path(mode, "step-3").exists()
    else:
        raise AssertionError("NaN went unnoticed")
# NaN that is accepted ends in weights that are an error.
accepting = Model()
accepting.bad = True
told = []
listener = logging.Handler(logging.WARNING)
listener.emit = lambda record: told.append(record.getMessage())
logging.getLogger("outlast").addHandler(listener)
try:
    fit_unlucky(accepting, "accepted", check_for_nan_in_loss=False)
except SystemExit as left:
    assert left.code == 17, left.code
else:
    raise AssertionError("weights that are NaN went unnoticed")
assert sum("the loss is NaN or infinite on rank 0 at step 3" in line for line in told) == 1, told
# A user's ModelCheckpoint beside ours, and a policy that ends the run.
def policy(error):
    assert isinstance(error, outlast.OutlastError)
    return "ShutdownWorkload"
own = outlast.Config(checkpoint=outlast.CheckpointConfig(directory="bad2", save_interval=1))
beside = pl.callbacks.ModelCheckpoint("user", every_n_train_steps=2, save_top_k=-1)
ended = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False,
                   callbacks=[FaultToleranceSectionsCallback(exc_handling_policy=policy, config=own), beside])
try:
    ended.fit(bad, train_loader)
except SystemExit as left:
    assert left.code == 93, left.code
assert os.listdir("user") == ["epoch=0-step=2.ckpt"], os.listdir("user")
"""


LOCAL = """
import pathlib, shutil
from datetime import timedelta
class Counting(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.begins = []
    def on_train_batch_start(self, batch, index):
        self.begins.append(self.trainer.global_step)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(steps, *callbacks, ckpt_path=None, local=None, **options):
    model = Counting()
    trainer = pl.Trainer(accelerator="cpu", max_steps=steps, logger=options.pop("logger", False),
                         enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks))
    if local:
        update_trainer_local_checkpoint_io(trainer, local)
    trainer.fit(model, DataLoader(torch.ones(64, 4), batch_size=2), ckpt_path=ckpt_path)
    return trainer, model.begins

trainer, begins = fit(3)
trainer.save_checkpoint("three.ckpt")
trainer, begins = fit(5, LocalCheckpointCallback(2), local="quick")
assert begins == [0, 1, 2, 3, 4], begins
copies = sorted(str(p) for p in pathlib.Path("quick/local_ckpt").glob("*/*"))
assert copies
trainer, begins = fit(7, LocalCheckpointCallback(2), local="quick", ckpt_path="three.ckpt")
assert begins == [5, 6], begins
trainer, begins = fit(9, ckpt_path="three.ckpt")
trainer.save_checkpoint("nine.ckpt")
trainer, begins = fit(11, LocalCheckpointCallback(2), local="quick", ckpt_path="nine.ckpt")
assert begins == [9, 10], begins
trainer, begins = fit(12, LocalCheckpointCallback(2), local="quick", ckpt_path="nine.ckpt")
assert begins == [11], begins
# A damaged copy is not loaded: of what is left, the newest is.
tiers = outlast.Config(checkpoint=outlast.CheckpointConfig(directory="global", save_interval=4))
fit(6, FaultToleranceCallback(config=tiers), LocalCheckpointCallback(1), local="fast2")
shutil.rmtree("global/step-6")
(newest,) = pathlib.Path("fast2").rglob("step-6/*.safetensors")
content = bytearray(newest.read_bytes())
content[-1] ^= 1
newest.write_bytes(content)
_, begins = fit(8, FaultToleranceCallback(config=tiers), LocalCheckpointCallback(1), local="fast2")
assert begins == [5, 6, 7], begins
_, begins = fit(8, FaultToleranceCallback(config=tiers))  # complete already
assert begins == [], begins
# By the clock: after every step.
timed = outlast.Config(checkpoint=outlast.CheckpointConfig(directory="global3"))
fit(6, FaultToleranceCallback(config=timed), LocalCheckpointCallback(train_time_interval=timedelta(microseconds=1)),
    local="fast3")
assert [path for path in pathlib.Path("fast3").rglob("step-5")], os.listdir("fast3")
# A checkpoint that fit() is given and cannot be read, cut or missing, does not end a run that has saved its own.
content = pathlib.Path("nine.ckpt").read_bytes()
pathlib.Path("cut.ckpt").write_bytes(content[: len(content) // 2])
pathlib.Path("text.ckpt").write_text("this is not a checkpoint")
warned = []
second = logging.Handler(logging.WARNING)
second.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("outlast").addHandler(second)
for steps, given in ((9, "cut.ckpt"), (10, "missing.ckpt"), (11, "text.ckpt")):
    for attempt in range(2 if steps == 9 else 1):
        warned.clear()
        _, begins = fit(steps, FaultToleranceCallback(config=tiers), ckpt_path=given)
        assert begins == ([steps - 1] if not attempt else []), begins
        lines = [line for line in warned if "cannot be read" in line]
        assert len(lines) == 1 and f"{given}, which fit() was given" in lines[0], warned
for given in ("cut.ckpt", "missing.ckpt"):
    empty = outlast.Config(checkpoint=outlast.CheckpointConfig(directory=f"empty-{given}"))
    try:
        fit(9, FaultToleranceCallback(config=empty), ckpt_path=given)
    except Exception as error:
        assert not isinstance(error, (outlast.OutlastError, AssertionError)), error
    else:
        raise AssertionError("an unreadable checkpoint is the only one, and was ignored")
logging.getLogger("outlast").removeHandler(second)
# Scores of slow ranks reach the trainer's loggers.
class Scores(pl.loggers.CSVLogger):
    got = []
    def log_metrics(self, metrics, step=None):
        self.got.extend(metrics)
fit(40, StragglerDetectionCallback(report_time_interval=0.01, num_gpu_perf_scores_to_print=0), logger=Scores("logs"))
assert {f"gpu_individual_perf/{which}" for which in ("min", "median", "max")} <= set(Scores.got), Scores.got
print("checked local checkpoints and scores")
"""
