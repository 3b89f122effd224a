"""Ray Train with outlast: hung workers are identified and ended, loads are verified, and runs without progress end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402

from outlast.config import CheckpointConfig, Config, FaultToleranceConfig, InProcessRestartConfig  # noqa: E402
from outlast.errors import BudgetExhausted, ConfigError, OutlastError  # noqa: E402
from outlast.incidents import EventKind  # noqa: E402
from outlast.journal import read  # noqa: E402
from outlast.ray.train import TrainCallback, session  # noqa: E402

pytestmark = pytest.mark.extended

STEP_TIMEOUT_S = 5.0
WORKERS = 2


def train_function():
    """Return the train function; a nested function is pickled by value, so that workers need no module of the tests."""

    def train(config):
        import json
        import os
        import signal
        import time

        import torch
        import torch.distributed as dist

        import outlast.ray.train

        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rank = dist.get_rank()
        with outlast.ray.train.session() as run, open(f"{config['folder']}/rank-{rank}.jsonl", "a") as log:
            for iteration in run.steps({"model": model, "optimizer": optimizer}, total=config["total"]):
                cycle = int(os.environ["OUTLAST_CYCLE"])
                log.write(json.dumps({"pid": os.getpid(), "attempt": cycle, "iteration": iteration}) + "\n")
                log.flush()
                for fault in config["faults"]:
                    if fault["attempt"] in (cycle, None) and [fault["rank"], fault["iteration"]] == [rank, iteration]:
                        if fault["kind"] == "sleep":
                            time.sleep(600)
                        while fault["kind"] == "stop":  # it is continued for a moment, for its stacks
                            os.kill(os.getpid(), signal.SIGSTOP)
                torch.manual_seed(1000 * iteration + rank)
                loss = (model(torch.randn(4, 8)) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
        torch.save(model.state_dict(), f"{config['folder']}/final-{rank}.pt")

    return train


def undisturbed(total):
    """Return the weights after ``total`` undisturbed steps, computed in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers, for the same order of sums
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for iteration in range(total):
        gradients = []
        for rank in range(WORKERS):
            torch.manual_seed(1000 * iteration + rank)
            loss = (model(torch.randn(4, 8)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = one + other
        optimizer.step()
    torch.set_num_threads(threads)
    return model.state_dict()


def fit(folder, *, total, faults, max_no_progress_cycles=3):
    """Train in ``folder`` until ``total``, with any number of worker restarts by Ray Train."""
    callback = TrainCallback(
        fault_tolerance=FaultToleranceConfig(
            rank_section_timeouts={"step": STEP_TIMEOUT_S}, max_no_progress_cycles=max_no_progress_cycles
        ),
        checkpoint=CheckpointConfig(
            directory=str(folder / "checkpoints"),
            save_interval=2,
            async_save=False,
            resume_from_other_run=True,  # one test continues from a copy of another run's directory
        ),
        run_dir=str(folder / "run"),
    )
    return TorchTrainer(
        train_function(),
        train_loop_config={"folder": str(folder), "total": total, "faults": faults},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "results"),
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[callback],
        ),
    ).fit()


def steps(folder, rank):
    """Return the iterations of each attempt of a rank, and its process in each."""
    lines = [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]
    attempts = sorted({line["attempt"] for line in lines})
    return {
        attempt: (
            {line["pid"] for line in lines if line["attempt"] == attempt},
            [line["iteration"] for line in lines if line["attempt"] == attempt],
        )
        for attempt in attempts
    }


def incidents(folder):
    """Return the hangs in the journal, oldest first."""
    found = (event.data["incident"] for event in read(folder / "run") if event.kind == EventKind.INCIDENT)
    return [incident for incident in found if incident["kind"] == "worker_hung"]


@pytest.fixture(scope="module", autouse=True)
def train_environment():
    """Let Ray Train poll its workers more often than every two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        yield


@pytest.fixture(scope="module")
def disturbed(ray_cluster, train_environment, tmp_path_factory):
    """Return the folder of a run of ten iterations in which two workers hung."""
    folder = tmp_path_factory.mktemp("disturbed")
    faults = [
        {"attempt": 0, "rank": 1, "iteration": 5, "kind": "sleep"},
        {"attempt": 1, "rank": 0, "iteration": 8, "kind": "stop"},
    ]
    fit(folder, total=10, faults=faults)
    return folder


@pytest.mark.campaign
@pytest.mark.process
def test_hung_workers_are_replaced_and_training_completes(disturbed):
    """A worker that sleeps in a step and one that is stopped are each identified, training resumes from the last save,
    and the weights are those of an undisturbed run."""
    for rank in range(WORKERS):
        did = steps(disturbed, rank)
        assert [iterations for _, iterations in did.values()] == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8], [8, 9]]
        assert len(set.union(*(pids for pids, _ in did.values()))) == 3
    found = incidents(disturbed)
    assert [(one.get("cycle", 0), one["rank"], one["iteration"], one["section"]) for one in found] == [
        (0, 1, 5, "step"),
        (1, 0, 8, "step"),
    ]
    assert "in train" in found[0]["evidence"]["stack_line"]
    assert found[1]["evidence"]["process_state"] == "T"
    for one in found:
        pids, _ = steps(disturbed, one["rank"])[one.get("cycle", 0)]
        assert pids == {one["pid"]}
        stacks = Path(one["evidence"]["stacks"])
        assert sorted(path.name for path in stacks.iterdir()) == ["rank-0.txt", "rank-1.txt"]
    expected = undisturbed(10)
    for rank in range(WORKERS):
        final = torch.load(disturbed / f"final-{rank}.pt")
        assert all(torch.equal(final[name], expected[name]) for name in expected)


@pytest.mark.campaign
@pytest.mark.process
def test_damaged_checkpoints_and_stalled_runs_are_handled(disturbed, tmp_path):
    """The newest directory is loaded only if every byte is verified; a run without progress ends, with the reason."""
    shutil.copytree(disturbed / "checkpoints", tmp_path / "checkpoints")
    shard = max((tmp_path / "checkpoints" / "step-10").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    hopeless = {"attempt": None, "rank": 1, "iteration": 9, "kind": "sleep"}
    with pytest.raises(ControllerError, match="max_no_progress_cycles=1") as raised:
        fit(tmp_path, total=14, faults=[hopeless], max_no_progress_cycles=1)
    assert isinstance(raised.value.controller_failure, BudgetExhausted)
    assert [iterations for _, iterations in steps(tmp_path, 1).values()] == [[8, 9], [8, 9]]


def test_a_session_without_a_callback_is_an_error():
    """Without a TrainCallback the error names the missing callback."""
    with pytest.raises(OutlastError, match="TrainCallback"):
        session()


def test_unusable_settings_are_rejected():
    """Settings that have no effect under Ray Train are rejected when the callback is constructed, not ignored."""
    with pytest.raises(ConfigError, match="calc_ft_timeouts"):
        TrainCallback(fault_tolerance=FaultToleranceConfig(calc_ft_timeouts=True))
    with pytest.raises(ConfigError, match="in_process_restart"):
        TrainCallback(Config(in_process_restart=InProcessRestartConfig(enabled=True)))


def test_arguments_override_the_config():
    """Settings can be given in one Config or by name, and the name takes precedence."""
    config = Config(seed=3, checkpoint=CheckpointConfig(directory="/one"), run_dir="/run")
    callback = TrainCallback(config, checkpoint=CheckpointConfig(directory="/other"))
    assert callback.config.checkpoint.directory == "/other"
    assert (callback.config.seed, callback.config.run_dir) == (3, "/run")


def test_a_reported_nan_loss_is_logged_once(caplog):
    """Without a session outlast receives only the reported loss: the first value that is not finite is a WARNING."""
    callback = TrainCallback()
    callback.after_report(None, [{"loss": 1.0, "note": "x"}, {"accuracy": float("nan")}])
    assert not caplog.records
    for _ in range(2):
        callback.after_report(None, [{"loss": 1.0}, {"train_loss": float("inf"), "loss": 2}])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "train_loss is inf on rank 1, and training continues with it" in record.getMessage()
