"""NeMo-Run launches through outlast: its plug-ins, its local executor, and its batch scripts on a real Slurm."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import gated_training
import psutil
import pytest
from gated_training import Launch
from pages import python_blocks

from outlast import Config
from outlast.config import PreemptionConfig
from outlast.errors import ConfigError
from outlast.incidents import EventKind, IncidentKind
from outlast.integrations.ft_launcher import write_shims
from outlast.journal import read

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "slurm"))

pytestmark = [pytest.mark.overlay, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nemo() -> Any:
    """Return NeMo-Run, without the warnings of its imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("nemo_run")


@pytest.fixture(scope="module")
def plugins(nemo: Any) -> Any:
    return importlib.import_module("outlast.integrations.nemo_run")


def reference() -> dict[str, dict[str, Any]]:
    """Return the fields, and their defaults, of Megatron-Bridge's plug-ins, from their source."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations
    found = [Path(place, "bridge/recipes/run_plugins.py") for place in spec.submodule_search_locations]
    source = next(path for path in found if path.exists()).read_text()
    return {
        node.name: {
            one.target.id: ast.literal_eval(one.value) if one.value is not None else dataclasses.MISSING
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def test_plugin_fields_match_megatron_bridge(plugins: Any) -> None:
    """Plug-ins and converter arguments have all fields of Megatron-Bridge's, with its defaults."""
    expected_fields = reference()
    for name in (one for one in plugins.__all__ if dataclasses.is_dataclass(getattr(plugins, one))):
        ours = {field.name: field.default for field in dataclasses.fields(getattr(plugins, name))}
        assert expected_fields[name].items() <= ours.items(), name
        assert plugins.__dict__[name].__doc__


def test_script_gets_the_documented_arguments(nemo: Any, plugins: Any) -> None:
    """A script gets hydra-style overrides, or the converter's result; an inline script gets none."""
    task = nemo.Script(path="train.py", entrypoint="python", args=["--lr", "3"])
    for plugin in (plugins.FaultTolerancePlugin(), plugins.PreemptionPlugin()):
        plugin.setup(task, nemo.LocalExecutor())
    assert task.args == [
        *("--lr", "3", "ft.enable_ft_package=true", "ft.calc_ft_timeouts=true"),
        *("train.exit_signal_handler=True", "train.exit_signal_handler_for_dataloader=False"),
    ]
    task = nemo.Script(path="train.py")
    convert = {"script_args_converter_fn": lambda args: [f"--{name}={value}" for name, value in vars(args).items()]}
    plugins.FaultTolerancePlugin(calc_ft_timeouts=False, **convert).setup(task, nemo.LocalExecutor())
    plugins.PreemptionPlugin(enable_exit_handler=False, **convert).setup(task, nemo.LocalExecutor())
    assert task.args == [
        *("--enable_ft_package=True", "--calc_ft_timeouts=False"),
        *("--enable_exit_handler=False", "--enable_exit_handler_for_data_loader=False"),
    ]
    task = nemo.Script(inline="python train.py")
    plugins.FaultTolerancePlugin().setup(task, nemo.LocalExecutor())
    assert task.args == []


@dataclasses.dataclass
class Ft:
    enable_ft_package: bool = False
    calc_ft_timeouts: bool = False


@dataclasses.dataclass
class Train:
    exit_signal_handler: bool = False
    exit_signal_handler_for_dataloader: bool = False


@dataclasses.dataclass
class Container:
    train: Train
    ft: Ft | None = None


def train(config: Container) -> None:
    """A function in the form of a Megatron-Bridge recipe."""


def train_with_outlast_config(config: Config) -> None:
    """A function that accepts a config of outlast."""


def plain(total: int = 3) -> None:
    """A function without a config."""


def test_partial_gets_settings_in_its_config(nemo: Any, plugins: Any) -> None:
    """config.ft and config.train, or outlast's own sections, are set and created if missing."""
    task = nemo.Partial(train, config=nemo.Config(Container, train=nemo.Config(Train)))
    both = (plugins.FaultTolerancePlugin(), plugins.PreemptionPlugin(enable_exit_handler_for_data_loader=True))
    for plugin in both:
        plugin.setup(task, nemo.LocalExecutor())
    built = nemo.config.fdl.build(task.config)
    assert (built.ft, built.train) == (Ft(True, True), Train(True, True))
    task = nemo.Partial(train_with_outlast_config, config=nemo.Config(Config))
    for plugin in both:
        plugin.setup(task, nemo.LocalExecutor())
    built = nemo.config.fdl.build(task.config)
    assert built.fault_tolerance.calc_ft_timeouts
    assert built.preemption == PreemptionConfig(exit_signal_handler_for_dataloader=True)


def test_disabled_exit_handler_sends_no_signal(nemo: Any, plugins: Any) -> None:
    """Without an exit handler Slurm sends no signal and a session does not listen; impossible settings are rejected."""
    executor = nemo.SlurmExecutor(account="a")
    task = nemo.Partial(train_with_outlast_config, config=nemo.Config(Config))
    plugin = plugins.PreemptionPlugin(enable_exit_handler=False)
    plugin.setup(task, executor)
    assert executor.signal is None
    built = nemo.config.fdl.build(task.config)
    assert built.preemption == PreemptionConfig(exit_signal_handler=False, preempt_time=0.0)
    with pytest.raises(ConfigError, match="enable_exit_handler=False cannot be set"):
        plugin.setup(nemo.Partial(plain), executor)
    plugins.PreemptionPlugin().setup(nemo.Partial(plain), executor)
    assert executor.signal == "TERM@60"


def test_executor_gets_launcher_retries_and_environment(nemo: Any, plugins: Any) -> None:
    """The executor gets launcher, retries and environment; a second setup changes nothing."""
    for executor in (nemo.LocalExecutor(), nemo.SlurmExecutor(account="a")):
        for timeouts in ({"step": 3.0, "a b": None}, "step:3,a b:"):
            plugins.FaultTolerancePlugin(
                num_in_job_restarts=0,
                num_job_retries_on_failure=5,
                rank_section_timeouts=timeouts,
                rank_out_of_section_timeout=9,
                shims="/shared/shims",
            ).setup(nemo.Partial(plain), executor)
        assert isinstance(executor.launcher, nemo.FaultTolerance)
        launcher = executor.launcher
        assert (launcher.initial_rank_heartbeat_timeout, launcher.rank_heartbeat_timeout) == (1800, 300)
        assert executor.retries == 5
        is_slurm = isinstance(executor, nemo.SlurmExecutor)
        assert executor.env_vars == {
            "OUTLAST_FT_ENABLE_FT_PACKAGE": "true",
            "OUTLAST_FT_CALC_FT_TIMEOUTS": "true",
            "OUTLAST_FT_RANK_SECTION_TIMEOUTS": "'step:3.0,a b:none'" if is_slurm else "step:3.0,a b:none",
            "OUTLAST_FT_RANK_OUT_OF_SECTION_TIMEOUT": "9",
            "PET_MAX_RESTARTS": "0",
            "PATH": "/shared/shims:$PATH" if is_slurm else "/shared/shims",
        }


@pytest.mark.slow
def test_recipe_gets_callbacks_once(nemo: Any, plugins: Any) -> None:
    """Callbacks are appended once, an existing class is kept, and settings without effect are rejected."""
    recipe = importlib.import_module("guide_recipe").pretrain_recipe(name="a", dir="/logs", gates=[], total=3)
    own = list(recipe.trainer.callbacks)
    recipe.trainer.callbacks.append(plugins.straggler_det_callback(stop_if_detected_straggler=False))
    for plugin in (plugins.FaultTolerancePlugin(calc_ft_timeouts=False), plugins.PreemptionPlugin()) * 2:
        plugin.setup(recipe, nemo.LocalExecutor())
    assert recipe.trainer.callbacks[: len(own)] == own
    stragglers, ft, preemption = recipe.trainer.callbacks[len(own) :]
    assert not nemo.config.fdl.build(stragglers).detection["stop_if_detected"]
    assert (ft.__fn_or_cls__.__name__, ft.exp_dir, ft.calculate_timeouts) == ("FaultToleranceCallback", "/logs", False)
    assert (preemption.__fn_or_cls__.__name__, preemption.sig) == ("PreemptionCallback", signal.SIGTERM)
    recipe.trainer.callbacks = []
    plugins.FaultTolerancePlugin(enable_ft_package=False).setup(recipe, nemo.LocalExecutor())
    plugins.PreemptionPlugin(callbacks=[stragglers]).setup(recipe, nemo.LocalExecutor())
    assert recipe.trainer.callbacks == [stragglers]
    recipe.trainer.callbacks = []
    plugins.PreemptionPlugin(sig=signal.SIGUSR2).setup(recipe, nemo.LocalExecutor())
    assert recipe.trainer.callbacks[0].sig == signal.SIGUSR2
    rejected = [
        (
            plugins.PreemptionPlugin(sig=signal.SIGUSR2),
            recipe,
            nemo.SlurmExecutor(account="a"),
            "only passes on SIGTERM",
        ),
        (plugins.PreemptionPlugin(sig=signal.SIGUSR2), nemo.Script(path="a"), nemo.LocalExecutor(), "have no name for"),
        (
            plugins.PreemptionPlugin(callbacks=[ft]),
            nemo.Partial(plain),
            nemo.LocalExecutor(),
            "callbacks has no effect",
        ),
    ]
    for plugin, task, executor, message in rejected:
        with pytest.raises(ConfigError, match=message):
            plugin.setup(task, executor)


@pytest.mark.parametrize(
    ("plugin", "values", "message"),
    [
        ("FaultTolerancePlugin", {"num_in_job_restarts": -1}, "num_in_job_restarts=-1"),
        ("FaultTolerancePlugin", {"initial_rank_heartbeat_timeout": 10}, "must be at least rank_heartbeat_timeout"),
        ("FaultTolerancePlugin", {"rank_section_timeouts": "step=3"}, "rank_section_timeouts: 'step=3'"),
        ("FaultTolerancePlugin", {"rank_section_timeouts": {"a:b": 3}}, "rename the section"),
        ("PreemptionPlugin", {"preempt_time": -1}, "preempt_time=-1"),
        (
            "PreemptionPlugin",
            {"enable_exit_handler": False, "enable_exit_handler_for_data_loader": True},
            "has no effect with enable_exit_handler=False",
        ),
        ("PreemptionPlugin", {"sig": signal.SIGUSR2}, "sig=SIGUSR2 cannot be set"),
    ],
)
def test_invalid_value_is_rejected(
    nemo: Any, plugins: Any, plugin: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """An invalid value is one line, before anything is launched."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        getattr(plugins, plugin)(**values).setup(nemo.Partial(plain), nemo.LocalExecutor())


LAUNCH = """\
import sys
import nemo_run as run
from outlast.integrations.nemo_run import FaultTolerancePlugin, PreemptionPlugin
from gated_training import train

if __name__ == "__main__":
    folder, total, kind, *words = sys.argv[1:]
    if kind == "script":
        task = run.Script(path={program!r}, entrypoint="python", args=[folder, total, *words])
    else:
        task = run.Partial(train, folder=folder, total=int(total), gates=words)
    executor = run.LocalExecutor(ntasks_per_node=2)
    heartbeat = 6 if "--heartbeats" in words else 300
    plugin = FaultTolerancePlugin(rank_section_timeouts={{"step": 6}}, rank_heartbeat_timeout=heartbeat)
    with run.Experiment("try", executor=executor, base_dir=folder) as experiment:
        experiment.add(task, plugins=[plugin, PreemptionPlugin()], name="gated", tail_logs=True)
        experiment.run()
    print("ended as", *(job.state for job in experiment.jobs), flush=True)
"""


def launch_script(folder: Path, script: str | Path, *argv: str, **variables: str) -> AbstractContextManager[Launch]:
    """Start a user's launching script, a file or its text, in ``folder``."""
    path = script if isinstance(script, Path) else folder / "launch.py"
    if not isinstance(script, Path):
        path.write_text(script)
    python_path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": python_path, "NEMORUN_HOME": str(folder / "home"), **variables}
    return gated_training.launched(folder, sys.executable, str(path), *argv, **variables)


def incidents(folder: Path) -> set[str]:
    """Return the kinds of incidents in the journals of all runs that were launched in a folder."""
    events = [event for run in (folder / "outlast-runs").iterdir() for event in read(run)]
    return {event.data["incident"]["kind"] for event in events if event.kind == EventKind.INCIDENT}


LOCAL = LAUNCH.format(program=str(gated_training.PROGRAM))


@pytest.mark.process
@pytest.mark.slow
def test_script_survives_killed_and_hung_ranks(tmp_path: Path) -> None:
    """After a SIGKILL and a SIGSTOP the result is that of an undisturbed run."""
    with launch_script(tmp_path, LOCAL, str(tmp_path), "12", "script", "@0:1:5", "@1:0:8") as launch:
        launch.signal_at_gate(0, signal.SIGKILL)
        launch.signal_at_gate(1, signal.SIGSTOP)
        assert launch.process.wait(300) == 0, launch.process.tail(80)
        assert "ended as SUCCEEDED" in launch.process.output(), launch.process.tail(80)
    assert (tmp_path / "digest").read_text() == gated_training.undisturbed(12)
    assert {IncidentKind.WORKER_DIED, IncidentKind.WORKER_HUNG} <= incidents(tmp_path)
    assert gated_training.first_iteration(tmp_path, cycle=1) in (2, 4)
    assert gated_training.first_iteration(tmp_path, cycle=2) in (6, 8)


@pytest.mark.process
@pytest.mark.slow
def test_partial_exits_on_sigterm_to_one_rank_and_resumes(tmp_path: Path) -> None:
    """After SIGTERM to one rank all save the same step (75), and the next launch resumes there."""
    with launch_script(tmp_path, LOCAL, str(tmp_path), "10", "partial", "@0:1:5") as launch:
        launch.signal_at_gate(0, signal.SIGTERM)
        (tmp_path / "open-0").touch()
        launch.process.wait(300)
        assert "ended as FAILED" in launch.process.output(), launch.process.tail(80)
        assert "exit code 75" in launch.process.output(), launch.process.tail(80)
    assert not (tmp_path / "digest").exists()
    last_iteration = max(int(line.split()[1]) for line in (tmp_path / "rank-0").read_text().splitlines())
    (tmp_path / "rank-0").unlink()
    with launch_script(tmp_path, LOCAL, str(tmp_path), "10", "partial", "@0:1:5") as launch:
        assert launch.process.wait(300) == 0, launch.process.tail(80)
    assert (tmp_path / "digest").read_text() == gated_training.undisturbed(10)
    assert gated_training.first_iteration(tmp_path, cycle=0) == last_iteration + 1


@pytest.mark.process
@pytest.mark.slow
def test_hung_rank_is_restarted_with_heartbeats_only(tmp_path: Path) -> None:
    """In a script without a session, with heartbeats and its own checkpoints, a hung rank is restarted."""
    with launch_script(tmp_path, LOCAL, str(tmp_path), "8", "script", "@0:1:3", "--heartbeats") as launch:
        launch.signal_at_gate(0, signal.SIGSTOP)
        assert launch.process.wait(300) == 0, launch.process.tail(80)
    assert (tmp_path / "digest").read_text() == gated_training.undisturbed(8)
    assert IncidentKind.WORKER_HUNG in incidents(tmp_path)
    assert gated_training.first_iteration(tmp_path, cycle=1) == 3


@pytest.fixture(scope="module")
def slurm() -> Iterator[Any]:
    from slurm_cluster import run_slurm

    with run_slurm() as cluster:
        yield cluster


ON_SLURM = """\
import sys
import nemo_run as run
from outlast.integrations.nemo_run import FaultTolerancePlugin, PreemptionPlugin

if __name__ == "__main__":
    folder, shims, retries, nodes, program, *words = sys.argv[1:]
    executor = run.SlurmExecutor(
        account="research", partition="main", nodes=int(nodes), ntasks_per_node=1, time="00:30:00",
        tunnel=run.LocalTunnel(job_dir=folder + "/experiments"), packager=run.Packager(),
        poll_estimated_start_time=False,
    )
    executor.env_vars["PET_FT_CFG_PATH"] = folder + "/ft.toml"
    plugin = FaultTolerancePlugin(shims=shims, num_job_retries_on_failure=int(retries))
    task = run.Script(path=program, entrypoint="python", args=words)
    with run.Experiment("try", executor=executor, base_dir=folder) as experiment:
        experiment.add(task, plugins=[plugin, PreemptionPlugin()], name="gated")
        experiment.run(detach=True)
    print("job", experiment.jobs[0].handle.rpartition("/")[2], flush=True)
"""


def submit(slurm: Any, folder: Path, *arguments: str, retries: int = 2, nodes: int = 1, config: str = "") -> str:
    """Submit a job through NeMo-Run; return its number."""
    shims = folder / "shims"
    write_shims(shims)
    (folder / "ft.toml").write_text(config)
    (folder / "submit.py").write_text(ON_SLURM)
    python_path = os.environ.get("PYTHONPATH", "")
    completed = subprocess.run(  # without a token, which the job would inherit and outlive
        [sys.executable, "submit.py", str(folder), str(shims), str(retries), str(nodes), *arguments],
        cwd=folder,
        env={**slurm.env, "PYTHONPATH": python_path, "NEMORUN_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    found = re.search(r"^job (\d+)$", completed.stdout, re.MULTILINE)
    assert found is not None, completed.stdout
    return found[1]


def logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted((folder / "experiments").rglob("*.out")))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "retries", "starts"), [(0, 2, 1), (17, 2, 1), (93, 2, 1), (19, 2, 1), (1, 2, 2), (1, 0, 1)]
)
def test_job_is_requeued_only_if_a_retry_can_help(
    slurm: Any, tmp_path: Path, code: int, retries: int, starts: int
) -> None:
    """A finished run, 17, 19 and 93 end the job; other failures are retried."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nopen({str(tmp_path / 'started')!r}, 'a').write('x')\nsys.exit({code})\n")
    config = '[health]\ncommands = ["false"]\n' if code == 19 else ""
    job = submit(slurm, tmp_path, str(script), retries=retries, config=config)
    facts = slurm.wait_for_end(job, told=lambda: logs(tmp_path))
    assert int(facts["Restarts"]) == starts - 1, logs(tmp_path)
    assert f"exit code {code}" in logs(tmp_path), logs(tmp_path)
    results = next((tmp_path / "experiments").rglob("*_job_results")).read_text().split()
    assert results[2::3] == ["S" if code == 0 else "F"] * starts
    flags = list((tmp_path / "experiments").rglob("*_finished_flag"))
    assert len(flags) == (code != 1)


def is_notice_logged_twice(log: Path) -> bool:
    return log.read_text().count("Received signal 15, initiating graceful stop") == 2


@pytest.mark.process
@pytest.mark.slow
def test_preempted_job_is_requeued_without_counting_failures(slurm: Any, tmp_path: Path) -> None:
    """Repeated SIGTERM requeues the job without counting failures, and it ends with an undisturbed run's weights."""
    gates = [f"@0:{start % 2}:{2 + 2 * start}" for start in range(3)]
    job = submit(slurm, tmp_path, str(gated_training.PROGRAM), str(tmp_path), "10", *gates, retries=2, nodes=2)
    for start in range(3):
        slurm.wait_until((tmp_path / "gate-0").exists, 180, lambda: logs(tmp_path))
        assert slurm.job(job)["Restarts"] == str(start)
        slurm.call("scancel", "--signal=TERM", job)
        log = next((tmp_path / "experiments").rglob(f"log-*_{start}.out"))
        slurm.wait_until(partial(is_notice_logged_twice, log), 120, lambda: logs(tmp_path))
        (tmp_path / "gate-0").rename(tmp_path / f"passed-{start}")
        (tmp_path / "open-0").touch()
        slurm.wait_until(lambda: slurm.job(job)["JobState"] == "PENDING", 120, lambda: logs(tmp_path))
        (tmp_path / "open-0").unlink()
    facts = slurm.wait_for_end(job, told=lambda: logs(tmp_path))
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "3"), logs(tmp_path)
    assert (tmp_path / "digest").read_text() == gated_training.undisturbed(10)
    results = next((tmp_path / "experiments").rglob("*_job_results")).read_text().split()
    assert results[2::3] == ["S"] * 4
    iterations = [int(line.split()[1]) for line in (tmp_path / "rank-0").read_text().splitlines()]
    assert iterations == sorted(set(iterations)), "an iteration was run twice"


@pytest.mark.process
@pytest.mark.slow
def test_job_is_requeued_after_the_death_of_a_launcher(slurm: Any, tmp_path: Path) -> None:
    """After the death of a launcher the job fails once, and its next start resumes from a checkpoint."""
    gates = ["@0:1:5"]
    job = submit(slurm, tmp_path, str(gated_training.PROGRAM), str(tmp_path), "10", *gates, retries=2, nodes=2)
    slurm.wait_until((tmp_path / "gate-0").exists, 180, lambda: logs(tmp_path))
    durable = (tmp_path / "checkpoints").glob
    slurm.wait_until(lambda: any(durable("step-*/manifest.json")), 120, lambda: logs(tmp_path))
    ancestors = psutil.Process(int((tmp_path / "gate-0").read_text())).parents()
    next(one for one in ancestors if "outlast.cli.shims" in " ".join(one.cmdline())).kill()
    facts = slurm.wait_for_end(job, told=lambda: logs(tmp_path))
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), logs(tmp_path)
    assert (tmp_path / "digest").read_text() == gated_training.undisturbed(10)
    results = next((tmp_path / "experiments").rglob("*_job_results")).read_text().split()
    assert results[2::3] == ["F", "S"]
    iterations = [int(line.split()[1]) for line in (tmp_path / "rank-0").read_text().splitlines()]
    assert next(two for one, two in itertools.pairwise(iterations) if two <= one) in (2, 4), iterations


@pytest.mark.process
@pytest.mark.slow
def test_documented_code_runs(tmp_path: Path) -> None:
    """All blocks of the page run, and the first one launches."""
    blocks = python_blocks("nemo-run.md")
    assert len(blocks) == 5, "a new block: let it run here"
    (tmp_path / "train.py").write_text("import sys\nprint('train.py got', sys.argv[1:], flush=True)\n")
    checks = """\
for plugin in plugins:
    plugin.setup(run.Script(path="train.py"), executor)
assert executor.signal == "TERM@120", executor.signal
assert executor.env_vars["PATH"] == "/shared/shims:$PATH"
print("all blocks ran")
"""
    with launch_script(tmp_path, "\n\n".join([*blocks, checks])) as launch:
        assert launch.process.wait(200) == 0, launch.process.tail(80)
    output = launch.process.output()
    assert "train.py got ['ft.enable_ft_package=true'" in output, launch.process.tail(80)
    assert "all blocks ran" in output


@pytest.mark.process
@pytest.mark.slow
def test_example_survives_a_lost_rank(tmp_path: Path) -> None:
    """The example survives the loss of a rank; a training that cannot start makes it fail."""
    example = HERE.parents[1] / "examples" / "nemo_run" / "launch.py"
    argv = ("--dir", str(tmp_path / "gpt"), "--iterations", "12", "--simulate-fault")
    with launch_script(tmp_path, example, *argv, OUTLAST_FT_SIMULATED_FAULT_TYPE="rank_killed") as launch:
        assert launch.process.wait(300) == 0, launch.process.tail(80)
    assert (tmp_path / "gpt" / "result.json").exists()
    assert IncidentKind.WORKER_DIED in incidents(tmp_path)
    with launch_script(tmp_path, example, "--dir", str(tmp_path / "gpt"), "--iterations", "none") as launch:
        assert launch.process.wait(300) != 0, launch.process.tail(80)
