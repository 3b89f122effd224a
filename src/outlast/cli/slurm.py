"""``outlast slurm``: write, submit and requeue batch scripts."""

from __future__ import annotations

import logging
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outlast import env, logs
from outlast.cli.job_command import CONTEXT, Option, in_options, job_options, parse_words, show_hints
from outlast.cli.main import CommandGroup, ScriptCommand, echo, failing_in_one_line
from outlast.errors import ConfigError, ExitReason
from outlast.integrations.slurm import BatchScript

if TYPE_CHECKING:
    from outlast.launch.run_parser import RunCommand


@click.group("slurm", cls=CommandGroup)
def slurm() -> None:
    """Run under Slurm: make and submit batch scripts, give a job back to the queue.

    Examples:
      outlast slurm submit --nodes 4 --spares 1 --time 4:00:00 -- train.py
      outlast slurm submit --nodes 4 --dry-run -- train.py
      outlast slurm script --nodes 4 --outlast 'uv run outlast' -- train.py
    """


_RETRIES = "--num-job-retries-on-failure"
_CLEARLY_OURS = frozenset(["--cpus-per-task", "--dry-run", "--gpus-per-node", "--nodes", _RETRIES, "--preempt-time"])
"""Options that a training script is unlikely to have, so that they were most likely misplaced."""


_OPTIONS: tuple[Option, ...] = (
    ("--nodes", "N", "Nodes that train."),
    ("--spares", "N", "Nodes that wait for the slot of a lost one."),
    ("--nproc-per-node", "N", "Workers on a node: a number, auto, gpu, xpu or cpu."),
    ("--run-id", "ID", "Names the run in every job of it; default: the script's name."),
    ("--run-dir", "DIR", "Shared by all nodes; default outlast-runs/ID."),
    ("--job-name", "NAME", "Default: the run's id."),
    ("--time", "LIMIT", "Time limit: 90, 4:00:00, 2-00; default the partition's."),
    ("--preempt-time", "SECONDS", "Request the workers to save and leave this long before the end; 0 = do not."),
    (_RETRIES, "N", "Failed jobs in a row, without progress, that go back to the queue."),
    ("--partition", "NAME", "As sbatch has it, and so the next ones."),
    ("--account", "NAME", ""),
    ("--qos", "NAME", ""),
    ("--gpus-per-node", "N", "A number, or a type and a number (h100:8)."),
    ("--cpus-per-task", "N", "CPUs of a node, for all its workers; without it Slurm may bind them to one core."),
    ("--mem", "SIZE", ""),
    ("--exclude", "NODES", "Nodes to keep away from, such as n[3-5],n9."),
    ("--directive directives", "OPTION", "Another option for #SBATCH: --constraint=ib; repeat."),
    ("--srun", "OPTION", "Another option for srun: --cpu-bind=cores, --container-image=IMAGE; repeat."),
    ("--setup", "LINE", "Shell command before the job's step, which ends the job if it fails; repeat."),
    ("--port", "N", "Where agents meet; default from the job's number."),
    (
        *("--outlast", "COMMAND"),
        "What is outlast on the nodes: a path, or a command line such as 'uv run outlast'.",
    ),
)


_options = job_options(_OPTIONS, BatchScript, single="exclude")
_EXAMPLES = """\b
Examples:
  outlast slurm {0} --nodes 4 --time 4:00:00 -- train.py --lr 3e-4
  outlast slurm {0} --nodes 4 --spares 1 --gpus-per-node 8 -- \\
      --ft-rank-section-timeouts=setup:600,step:180,checkpointing:420 train.py
  outlast slurm {0} --setup 'source venv/bin/activate' --directive=--constraint=ib -- train.py
  outlast slurm {0} --nodes 2 --outlast 'uv run outlast' -- train.py
  outlast slurm {0} --nodes 4 --cpus-per-task 64 --run-dir /shared/gpt \\
      --srun=--container-image=/shared/train.sqsh \\
      --srun=--container-mounts=/shared:/shared -- --config gpt.toml train.py
"""


@slurm.command("script", cls=ScriptCommand, context_settings=CONTEXT, epilog=_EXAMPLES.format("script"))
@_options
def script(**settings: Any) -> int:
    """Print the batch script of a job.

    What follows the options made here is what `outlast run` gets: more of its options, the training script, the
    script's arguments. It is checked as `outlast run` will check it, and the script must be there. The run directory
    must exist before sbatch is called: Slurm opens the job's output file in it.
    """
    made = _script_from(settings)
    if not Path(made.run_dir).is_dir():
        folder = shlex.quote(made.run_dir)
        echo(f"outlast: the run directory does not exist here; before sbatch: mkdir -p {folder}", err=True)
    click.echo(made.render(), nl=False)
    return int(ExitReason.FINISHED)


@slurm.command(
    "submit",
    cls=ScriptCommand,
    context_settings=CONTEXT,
    epilog=_EXAMPLES.format("submit") + "  outlast slurm submit --nodes 4 --dry-run -- train.py\n",
)
@click.option("--dry-run", is_flag=True, help="Print the script and the call of sbatch; submit and write nothing.")
@_options
def submit(dry_run: bool, **settings: Any) -> int:
    """Submit a job of a run, and print its number.

    Nodes that earlier jobs of the run found to be bad are excluded. The script is kept as job.sbatch in the run
    directory, as is the jobs' output; the directory is created. Exit code 1: Slurm refused the job.
    """
    from outlast.integrations.slurm.jobs import prepare
    from outlast.integrations.slurm.jobs import submit as hand_over

    _log_to_stderr()
    with failing_in_one_line():
        script = _script_from(settings)
        if dry_run:
            rendered, sbatch = prepare(script)
            click.echo(rendered, nl=False)
            echo("", f"# Not submitted. Without --dry-run: {shlex.join(sbatch)}")
        else:
            echo(hand_over(script))
    return int(ExitReason.FINISHED)


@slurm.command("requeue")
@click.option("--run-dir", required=True, metavar="DIR", help="The run directory.")
@click.option("--exit-code", required=True, type=click.IntRange(0, 255), help="Of the job's step.")
@click.option("--job-id", metavar="ID", help="Default: the job that this runs in.")
@click.option(
    _RETRIES,
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    metavar="N",
    help="Failed jobs in a row, without progress, that go back to the queue.",
)
def requeue(run_dir: str, exit_code: int, job_id: str | None, num_job_retries_on_failure: int) -> int:
    """Give an ended job back to the queue if that can help.

    Back go jobs that were shut down (75, or 128 and a signal), as often as it takes; failures (16, 18, 19 and all
    others) at most N times in a row without progress; never finished runs (0) and what needs a person (2, 17, 93).

    Exit code 0: done as decided, either way; 1: Slurm or the run directory refused; 2: bad input.

    Examples (in a batch script):
      srun ... ; code=$?
      outlast slurm requeue --run-dir=/shared/run --exit-code="$code"; exit "$code"
    """
    from outlast.integrations.slurm.jobs import end_job
    from outlast.runtime.slurm_job import get_slurm_info

    _log_to_stderr()
    if job_id is None:
        info = get_slurm_info()
        if info is None:
            raise ConfigError("this runs in no Slurm job; name one with --job-id")
        job_id = info.job_id
    with failing_in_one_line(f"job {job_id} is not given back: ", OSError):
        ruling = end_job(
            Path(run_dir).absolute(), job_id, exit_code, num_job_retries_on_failure=num_job_retries_on_failure
        )
    what = "goes back to the queue" if ruling.requeue else "is not re-queued"
    logging.getLogger(logs.OUTCOME).info("Slurm job %s %s: %s", job_id, what, ruling.reason)
    return int(ExitReason.FINISHED)


def _script_from(settings: dict[str, Any]) -> BatchScript:
    """Make the batch script from options; print hints and warnings on standard error.

    Raises:
        ConfigError: `outlast run` or Slurm would refuse a value, or the training script does not exist.
    """
    from outlast.launch.options import check_values

    command = tuple(settings.pop("command"))
    parsed = parse_words(command, "--nodes 2")
    _check_script(parsed, settings["directives"])
    run_id = settings.pop("run_id") or env.clean_name(Path(parsed.args.training_script).stem)
    run_dir = Path(settings.pop("run_dir") or Path("outlast-runs") / run_id).absolute()
    exclude = settings.pop("exclude")
    try:
        script = BatchScript(
            command=command,
            run_id=run_id,
            run_dir=str(run_dir),
            exclude=env.expand_nodes(exclude) if exclude else (),
            **settings,
        )
        check_values([f"--nnodes={script.nodes}:{script.nodes + script.spares}", *command])
    except ConfigError as error:
        raise ConfigError(in_options(str(error), _OPTIONS)) from None
    show_hints(parsed, _CLEARLY_OURS, _OPTIONS, script.warnings)
    return script


def _check_script(command: RunCommand, directives: tuple[str, ...]) -> None:
    """Check that the training script exists; modules, and programs without a folder, are looked up on the nodes."""
    from outlast.launch.options import why_not_there

    args, script = command.args, command.args.training_script
    if args.module or (args.no_python and "/" not in script):
        return
    folders = [found[1] for one in directives if (found := re.fullmatch(r"(?:--chdir=|-D[= ]?)(.+)", one))]
    if not Path(*folders[-1:], script).exists():
        where = f"in {folders[-1]}" if folders else "in this folder, in which the job starts"
        where = "" if os.path.isabs(script) else f" {where}"
        raise ConfigError(f"the script {script!r} does not exist{where}; {why_not_there(script)}")


def _log_to_stderr() -> None:
    logs.read_settings()
    logs.configure("slurm")
