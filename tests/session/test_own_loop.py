"""A session in a custom training loop: the same promises as for ``steps()``."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from slowed import SCRIPT as SLOWED

import outlast
from open_sessions import open_sessions
from outlast import clock
from outlast.checkpoint.catalogue.listing import look_into
from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.testing import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "own-loop.md"
WITHIN_S = 120.0


def example(folder: Path, begins: str = "A trainer") -> Path:
    """Write the documentation's example with this beginning, and return its path."""
    (code,) = re.findall(rf'```python\n("""{begins}.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(code)
    return script


def config(folder: Path, *lines: str) -> str:
    """Write a config file, and return its path."""
    path = folder / "outlast.toml"
    path.write_text("\n".join([*lines, "[checkpoint]", f'directory = "{folder}/ckpt"', "save_interval = 5"]))
    return str(path)


def checkpoints(folder: Path) -> set[int]:
    """Return the iterations of the committed checkpoints."""
    return {found.entry.iteration for found in look_into(str(folder / "ckpt")).found}


def results(text: str) -> set[str]:
    """Return the results that the example printed at its end."""
    return set(re.findall(r"trained \d+ steps: [0-9a-f]{64}", text))


def run_example(folder: Path, *faults: str) -> tuple[set[str], list[int], str]:
    """Run the example with two ranks under ``outlast run``; return results, first iterations, and the log."""
    script = example(folder)
    (folder / "plan.toml").write_text("\n".join(faults))
    config_path = config(folder, *([f'fault_plan = "{folder}/plan.toml"'] if faults else []))
    with Cluster(
        script, config_path, "23", run_dir=folder / "run", num_nodes=1, options=["--max-restarts=3"]
    ) as cluster:
        codes = cluster.wait(WITHIN_S)
        text = cluster.agents[0].output()
    assert codes == [0], text
    return results(text), [int(found) for found in re.findall(r"starting from iteration (\d+)", text)], text


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_trainer_resumes_bit_identically(tmp_path: Path) -> None:
    """The documentation's example, killed in its twelfth step, resumes from a checkpoint and ends with the weights
    of a run without the kill."""
    undisturbed, begins, _ = run_example(tmp_path / "undisturbed")
    assert len(undisturbed) == 1
    assert begins == [0, 0]
    kill = '[[faults]]\nname = "kill"\nkind = "kill"\nrank = 1\niteration = 12'
    killed, begins, text = run_example(tmp_path / "killed", kill)
    assert begins[:2] == [0, 0], text
    assert len(begins) == 4, text
    promised = max(map(int, re.findall(r"resuming from iteration (\d+)", text)), default=0)  # 0: no commit in time
    assert begins[2] == begins[3] >= promised, text
    assert killed == undisturbed


@pytest.mark.process
def test_a_trainer_saves_after_a_preemption_notice(tmp_path: Path) -> None:
    """After SIGTERM to one rank, all ranks exit with 75 after the same iteration, which has a complete checkpoint;
    the next start resumes from there."""
    script = example(tmp_path)
    config_path = config(tmp_path, f'run_dir = "{tmp_path}/run"')
    with Ranks(script, config_path, "1000000", world_size=2) as ranks:
        ranks.wait_for_line(0, "starting from iteration 0")
        ranks.wait_until(lambda: [e for e in read(tmp_path / "run") if e.kind == EventKind.SAVE_COMMITTED], WITHIN_S)
        ranks.signal(1, signal.SIGTERM)
        codes, outputs = ranks.end()
    assert codes == [ExitReason.PREEMPTED] * 2, "\n".join(outputs)
    (stopped_after,) = {e.iteration for e in read(tmp_path / "run") if e.kind == EventKind.SESSION_ENDED}
    assert stopped_after is not None
    assert max(checkpoints(tmp_path)) == stopped_after
    with Ranks(script, config_path, str(stopped_after + 2), world_size=2) as ranks:
        codes, outputs = ranks.end()
    assert codes == [0, 0], "\n".join(outputs)
    assert f"starting from iteration {stopped_after}\n" in outputs[0]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_slow_rank_ends_a_custom_loop(tmp_path: Path) -> None:
    """Slow ranks are detected in a custom loop too: all ranks exit with 18, and no iteration is lost."""
    script = tmp_path / "script.py"
    loop = 'for iteration in run.steps(state, total=options["total"]):\n'
    last = '    state["seen"].append(iteration)\n'
    assert loop in SLOWED
    assert last in SLOWED
    begin = 'iteration = run.restore(state)\nwhile iteration < options["total"]:\n    run.begin_step()\n'
    end = (
        '    decision = run.end_step(is_last=iteration + 1 == options["total"])\n    run.save_due(state)\n'
        "    if decision.stop:\n        break\n    iteration = run.iteration\nrun.finish(state)\n"
    )
    script.write_text(SLOWED.replace(loop, begin).replace(last, last + end))
    plan = [{"kind": "slow", "rank": 1, "iteration": 6, "factor": 4.0}]
    options = {"total": 60, "stop": True, "plan": plan}
    with Ranks(script, str(tmp_path), json.dumps(options), world_size=2) as ranks:
        codes, outputs = ranks.end(400)
    assert codes == [ExitReason.STRAGGLER] * 2, "\n".join(outputs)
    with Ranks(script, str(tmp_path), json.dumps({"total": 60, "stop": True}), world_size=2) as ranks:
        codes, outputs = ranks.end(400)
    assert codes == [0, 0], "\n".join(outputs)
    assert json.loads((tmp_path / "result.json").read_text())["seen"] == [*range(60)]


DIFFERS = """
import sys
import torch
import outlast

folder = sys.argv[1]
run = outlast.init(outlast.Config(
    checkpoint=outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=2),
    replica_digest=outlast.config.ReplicaDigestConfig(interval=1),
    run_dir=folder + "/run",
))
torch.manual_seed(1)
state = {"model": torch.nn.Linear(2, 2)}
for iteration in range(run.restore(state), 10):
    run.begin_step()
    with torch.no_grad():
        state["model"].weight += 1
        if iteration == 5 and run.global_rank == 1:
            state["model"].weight[0, 0] += 0.5
    decision = run.end_step(is_last=iteration == 9)
    saved = run.save_due(state)
    if saved is not None:
        saved.wait()
    if decision.stop:
        print("stopped at", decision.iteration, "for", decision.reason.name, decision.save, flush=True)
        break
run.finish(state)
"""


@pytest.mark.process
def test_differing_replicas_stop_the_loop_without_a_save(tmp_path: Path) -> None:
    """If replicas differ, all ranks get a decision to stop, and the iteration is not saved."""
    script = tmp_path / "script.py"
    script.write_text(DIFFERS)
    with Ranks(script, str(tmp_path), world_size=2) as ranks:
        codes, outputs = ranks.end()
    assert codes == [ExitReason.RESUME_TO_DISAMBIGUATE] * 2, "\n".join(outputs)
    for output in outputs:
        assert "stopped at 6 for RESUME_TO_DISAMBIGUATE None" in output
    assert max(checkpoints(tmp_path)) == 4


# -- in one process ------------------------------------------------------------------------------------------------


@contextmanager
def session(folder: Path, **settings: Any) -> Iterator[outlast.Session]:
    """Open a session of one rank in this process; its changes to this process are undone."""
    log_metrics: Callable[[dict[str, float], int], object] | None = settings.pop("log_metrics", None)
    tiers: dict[str, Any] = settings.pop("tiers", {})
    checkpoint = outlast.CheckpointConfig(directory=str(folder / "ckpt"), save_interval=2, async_save=False, **tiers)
    settings_of_session = outlast.Config(checkpoint=checkpoint, run_dir=str(folder / "run"), **settings)
    with open_sessions() as sessions:
        sessions.append(outlast.init(settings_of_session, log_metrics=log_metrics))
        yield sessions[0]


def wait_for_notice(folder: Path, count: int = 1) -> None:
    """Wait until a session has detected a preemption notice; for its ``count``-th one."""
    end_s = clock.now_s() + 10
    while sum(event.kind == EventKind.NOTICE for event in read(folder / "run")) < count:
        assert clock.now_s() < end_s, "the session has not detected the signal"
        time.sleep(0.005)


def test_a_step_runs_again_after_an_invalid_result(tmp_path: Path) -> None:
    """attempts() works between begin_step() and end_step(): a result that is NaN once is computed again."""
    plan = tmp_path / "plan.toml"
    plan.write_text('[[faults]]\nname = "nan"\nkind = "nan"\ntarget = "loss"\niteration = 2\n')
    weight = torch.zeros(1, requires_grad=True)
    state, seen = {"weight": weight}, []
    with session(tmp_path, fault_plan=str(plan)) as run:
        assert run.restore(state) == 0
        for _ in range(4):
            run.begin_step()
            for attempt in run.attempts():
                seen.append((run.iteration, attempt.number))
                attempt.validate((weight + 1).sum())
            run.end_step()
            run.save_due(state)
        run.finish(state)
    assert seen == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]


def test_a_decision_contains_the_due_save(tmp_path: Path) -> None:
    """``save`` follows the intervals, and save_due() does only that save; the last step's save is left to finish(),
    and a second session resumes from there."""
    state = {"weight": torch.zeros(1)}
    with session(tmp_path) as run:
        run.restore(state)
        found = []
        for iteration in range(5):
            run.begin_step()
            state["weight"] += 1
            decision = run.end_step(is_last=iteration == 4)
            handle = run.save_due(state)
            found.append((decision.iteration, decision.save, decision.stop, handle is not None))
        run.finish(state)
    assert found == [(n, "all" if n % 2 == 0 else None, False, n % 2 == 0) for n in range(1, 6)]
    assert checkpoints(tmp_path) >= {4, 5}
    restored = {"weight": torch.zeros(1)}
    with session(tmp_path) as run:
        assert run.restore(restored) == run.iteration == 5
        assert restored["weight"].item() == 5


@pytest.mark.parametrize("has_near", [False, True])
def test_a_requested_save_goes_to_the_requested_tiers(tmp_path: Path, has_near: bool) -> None:
    """Of several requests the one for more tiers counts, in any order; without a node-local tier, a request for a
    node-local save goes to all tiers."""
    state = {"weight": torch.zeros(1)}
    found = []
    tiers = {"local_directory": str(tmp_path / "local")} if has_near else {}
    with session(tmp_path, tiers=tiers) as run:
        run.restore(state)
        for requests in ([True], [], [False, True], [], [True, False], [], []):
            for near in requests:
                run.request_save(near=near)
            run.begin_step()
            state["weight"] += 1
            found.append(run.end_step().save)
            assert (run.save_due(state) is not None) == (found[-1] is not None)
            assert (run.iteration in checkpoints(tmp_path)) == (found[-1] == "all")
        run.finish(state)
    assert found == ["near" if has_near else "all", "all", "all", "all", "all", "all", None]


def test_a_preemption_notice_is_a_decision_to_stop(tmp_path: Path) -> None:
    """After SIGTERM the next decision is to stop, with the signal; leave() commits that iteration and exits with 75.
    After the last step there is no decision to stop."""
    state = {"weight": torch.zeros(1)}
    with session(tmp_path) as run:
        run.restore(state)
        signal.raise_signal(signal.SIGTERM)
        wait_for_notice(tmp_path)
        run.begin_step()
        state["weight"] += 1
        decision = run.end_step()
        assert (decision.stop, decision.reason, decision.signal) == (True, ExitReason.PREEMPTED, signal.SIGTERM)
        assert decision.save == "all"
        with pytest.raises(SystemExit) as exiting:
            run.finish(state)
        assert exiting.value.code == ExitReason.PREEMPTED
    assert checkpoints(tmp_path) == {1}
    with session(tmp_path) as run:
        run.restore(state)
        signal.raise_signal(signal.SIGTERM)
        wait_for_notice(tmp_path, 2)
        run.begin_step()
        assert not run.end_step(is_last=True).stop
        run.finish(state)
        assert run.iteration == 2


CALLS: dict[str, Callable[[outlast.Session, dict[str, Any]], Any]] = {
    "restore": lambda run, state: run.restore(state),
    "begin_step": lambda run, state: run.begin_step(),
    "end_step": lambda run, state: run.end_step(),
    "save_due": lambda run, state: run.save_due(state),
    "finish": lambda run, state: run.finish(state),
    "leave": lambda run, state: run.leave(state),
    "attempts": lambda run, state: list(run.attempts()),
    "steps": lambda run, state: next(run.steps(state, total=9)),
}


@pytest.mark.parametrize(
    ("before", "call", "remedy"),
    [
        ("", "begin_step", r"begin_step\(\) is out of order: call restore\(state\) first"),
        ("", "end_step", r"call restore\(state\) first"),
        ("", "finish", r"call restore\(state\) first"),
        ("restore", "restore", r"restore\(\) was called before; continue with begin_step\(\)"),
        ("restore", "end_step", r"call begin_step\(\) first"),
        ("restore", "attempts", r"between begin_step\(\) and end_step\(\)"),
        ("restore", "leave", r"leave\(\) without an agreement to stop; call finish\(state\)"),
        ("restore", "steps", r"steps\(\) was called before"),
        ("restore begin_step", "begin_step", r"call end_step\(\) first"),
        ("restore begin_step", "save_due", r"call end_step\(\) first"),
        ("restore begin_step", "finish", r"call end_step\(\) first"),
        ("restore finish", "begin_step", r"the loop has ended"),
        ("restore finish", "finish", r"the loop has ended"),
    ],
)
def test_a_call_out_of_order_is_an_error_with_the_right_call(
    tmp_path: Path, before: str, call: str, remedy: str
) -> None:
    """A call out of order is an OutlastError with the right call, and changes nothing."""
    state = {"weight": torch.zeros(1)}
    with session(tmp_path) as run:
        for name in before.split():
            CALLS[name](run, state)
        with pytest.raises(outlast.OutlastError, match=remedy):
            CALLS[call](run, state)


def test_a_decision_to_stop_allows_no_further_step(tmp_path: Path) -> None:
    """After all ranks agreed to stop, a further step is an error, because the other ranks exit."""
    state = {"weight": torch.zeros(1)}
    with session(tmp_path) as run:
        run.restore(state)
        signal.raise_signal(signal.SIGTERM)
        wait_for_notice(tmp_path)
        run.begin_step()
        run.end_step()
        with pytest.raises(outlast.OutlastError, match=r"all ranks agreed to stop: call finish\(state\) or leave"):
            run.begin_step()


# -- metrics -------------------------------------------------------------------------------------------------------


def documented() -> set[str]:
    """Return the names of the documentation's table; a part in brackets is a placeholder."""
    table = PAGE.read_text(encoding="utf-8").partition("<!-- log_metrics -->")[2].partition("<!-- end -->")[0]
    names = set()
    for cell in re.findall(r"^\| (`outlast/.*?) \|", table, re.MULTILINE):
        first, *endings = re.findall(r"`(.*?)`", cell)
        names |= {first, *(first.rpartition("/")[0] + ending for ending in endings)}
    return names


def test_metrics_have_their_documented_names(tmp_path: Path) -> None:
    """Each step logs its time, the number of restarts and of incidents; each save logs how long training waited for
    it."""
    logged: list[tuple[dict[str, float], int]] = []
    plan = tmp_path / "plan.toml"
    plan.write_text('[[faults]]\nname = "nan"\nkind = "nan"\ntarget = "loss"\niteration = 1\n')
    straggler = outlast.StragglerDetectionConfig(enabled=True, report_time_interval=1e-9)
    weight = torch.zeros(1, requires_grad=True)
    state = {"weight": weight}
    log = lambda metrics, iteration: logged.append((metrics, iteration))  # noqa: E731
    with session(tmp_path, log_metrics=log, fault_plan=str(plan), straggler_detection=straggler) as run:
        for _ in run.steps(state, total=40):
            for attempt in run.attempts():
                with run.section("forward"):
                    attempt.validate((weight + 1).sum())
    steps = [(metrics, iteration) for metrics, iteration in logged if "outlast/step_time_s" in metrics]
    saves = [(metrics, iteration) for metrics, iteration in logged if "outlast/save_stall_s" in metrics]
    assert [iteration for _, iteration in steps] == [*range(1, 41)]
    assert [iteration for _, iteration in saves] == [*range(2, 41, 2)]
    assert all(metrics["outlast/restart_count"] == 0 for metrics, _ in steps)
    assert all(metrics["outlast/step_time_s"] > 0 for metrics, _ in steps)
    assert all(metrics["outlast/save_stall_s"] > 0 for metrics, _ in saves)
    assert "outlast/incidents/invalid_result" not in steps[0][0]
    assert steps[-1][0]["outlast/incidents/invalid_result"] == 1
    assert any("outlast/gpu_individual_perf/min" in metrics for metrics, _ in steps)
    names = {re.sub(r"incidents/.*", "incidents/<kind>", name) for metrics, _ in logged for name in metrics}
    assert names <= documented()
    of_several_ranks = {f"outlast/gpu_relative_perf/{which}" for which in ("min", "median", "max")}
    assert documented() - names == of_several_ranks


def test_a_logger_that_raises_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error of the metrics logger does not end training and is reported once."""

    def log(metrics: dict[str, float], iteration: int) -> None:
        raise RuntimeError("no network")

    with session(tmp_path, log_metrics=log) as run:
        assert list(run.steps({"weight": torch.zeros(1)}, total=5)) == [*range(5)]
    (record,) = [record for record in caplog.records if "log_metrics" in record.getMessage()]
    assert "RuntimeError: no network" in record.getMessage()


@pytest.mark.slow
@pytest.mark.process
def test_metrics_count_restarts_and_the_launchers_incidents(tmp_path: Path) -> None:
    """After a restart the count is 1, and the worker's death is among the incidents."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nimport torch\nimport outlast\n"
        "logged = {}\n"
        "run = outlast.init(outlast.Config(), log_metrics=lambda figures, iteration: logged.update(figures))\n"
        "for iteration in run.steps({'weight': torch.zeros(1)}, total=3):\n"
        "    if os.environ['OUTLAST_CYCLE'] == '0':\n"
        "        os.kill(os.getpid(), 9)\n"
        "print('logged', logged['outlast/restart_count'], logged.get('outlast/incidents/worker_died'), flush=True)\n"
    )
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        assert cluster.wait(WITHIN_S) == [0], cluster.tails()
        assert "logged 1.0 1.0" in cluster.agents[0].output()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_a_shuffled_loader_resumes_exactly(tmp_path: Path) -> None:
    """The documentation's shuffled loader, killed within its second epoch, ends with the weights of a run without
    the kill, and without a warning; without a generator for the loader, one line reports it once."""
    digests = []
    for name, faults in (("undisturbed", ""), ("killed", '[[faults]]\nname = "k"\nkind = "kill"\niteration = 12\n')):
        script = example(tmp_path / name, "A loop over a shuffled")
        (tmp_path / name / "plan.toml").write_text(f"{faults}rank = 0\n" if faults else "")
        lines = [f'fault_plan = "{tmp_path / name}/plan.toml"'] if faults else []
        config_path = config(tmp_path / name, *lines)
        options = ["--max-restarts=3", "--no-health-check"]
        with Cluster(
            script, config_path, "20", run_dir=tmp_path / name / "run", num_nodes=1, nproc_per_node=1, options=options
        ) as cluster:
            assert cluster.wait(WITHIN_S) == [0], cluster.tails()
            text = cluster.agents[0].output()
        digests.append(results(text))
        assert "global generator" not in text
        assert ("resuming" in text) == bool(faults)
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]
    code = script.read_text().replace(", generator=torch.Generator()", "").replace("loader.generator.", "torch.")
    script.write_text(code)
    (tmp_path / "own").mkdir()
    with Ranks(script, config(tmp_path / "own"), "20") as ranks:
        (code,), (text,) = ranks.end()
    assert code == 0, text
    assert text.count("RandomSampler with generator=None") == 1
