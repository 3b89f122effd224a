"""``outlast slurm``: batch scripts for a run, and what they call."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outlast import env, logs
from outlast.cli.main import CommandGroup, ScriptCommand, complete_folder, echo, failing_in_one_line
from outlast.cli.run import complete_run_word
from outlast.errors import ConfigError, ExitReason

if TYPE_CHECKING:
    from outlast.integrations.slurm import BatchScript
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
"""Options that a training script hardly has itself, or that somebody who forgot where they go must hear of."""


_OPTIONS: tuple[tuple[str, str, str | int | tuple[()] | None, str], ...] = (
    ("--nodes", "N", 1, "Nodes that train."),
    ("--spares", "N", 0, "Nodes that wait for the slot of a lost one."),
    ("--nproc-per-node", "N", "auto", "Workers on a node: a number, auto, gpu, xpu or cpu."),
    ("--run-id", "ID", None, "Names the run in every job of it; default: the script's name."),
    ("--run-dir", "DIR", None, "Shared by all nodes; default outlast-runs/ID."),
    ("--job-name", "NAME", None, "Default: the run's id."),
    ("--time", "LIMIT", None, "Time limit: 90, 4:00:00, 2-00; default the partition's."),
    ("--preempt-time", "SECONDS", 60, "Request the workers to save and leave this long before the end; 0 = do not."),
    (_RETRIES, "N", 2, "Failed jobs in a row, without progress, that go back to the queue."),
    ("--partition", "NAME", None, "As sbatch has it, and so the next ones."),
    ("--account", "NAME", None, ""),
    ("--qos", "NAME", None, ""),
    ("--gpus-per-node", "N", None, "A number, or a type and a number (h100:8)."),
    ("--cpus-per-task", "N", None, "CPUs of a node, for all its workers; without it Slurm may bind them to one core."),
    ("--mem", "SIZE", None, ""),
    ("--exclude", "NODES", None, "Nodes to keep away from, such as n[3-5],n9."),
    ("--directive directives", "OPTION", (), "Another option for #SBATCH: --constraint=ib; repeat."),
    ("--srun", "OPTION", (), "Another option for srun: --cpu-bind=cores, --container-image=IMAGE; repeat."),
    ("--setup", "LINE", (), "Shell command before the job's step, which ends the job if it fails; repeat."),
    ("--port", "N", 0, "Where agents meet; default from the job's number."),
    (
        *("--outlast", "COMMAND", "outlast"),
        "What is outlast on the nodes: a path, or a command line such as 'uv run outlast'.",
    ),
)
"""Options of a batch script: names, the value's name, default (``()``: it may be repeated), help."""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a batch script."""
    command = click.argument(
        "command",
        metavar="[--] [RUN OPTION]... SCRIPT [ARGUMENT]...",
        nargs=-1,
        type=click.UNPROCESSED,
        shell_complete=complete_run_word,
    )(command)
    for names, metavar, default, text in reversed(_OPTIONS):
        command = click.option(
            *names.split(),
            type=int if isinstance(default, int) or names == "--cpus-per-task" else str,
            default=default,
            show_default=bool(default) or names == "--spares",
            multiple=default == (),
            metavar=metavar,
            shell_complete=complete_folder if metavar == "DIR" else None,
            help=text or None,
        )(command)
    return command


_CONTEXT = {"ignore_unknown_options": False, "allow_interspersed_args": False}
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


@slurm.command("script", cls=ScriptCommand, context_settings=_CONTEXT, epilog=_EXAMPLES.format("script"))
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
    context_settings=_CONTEXT,
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
    """Make the batch script that options ask for; tell on standard error what may be meant otherwise.

    Raises:
        ConfigError: What `outlast run` or Slurm would refuse, or there is no such training script.
    """
    from outlast.env import expand_nodes
    from outlast.integrations.slurm import BatchScript
    from outlast.launch.options import check_values
    from outlast.launch.run_parser import hint_at, parse_command

    command, example = tuple(settings.pop("command")), click.get_current_context().command_path
    if not command:
        raise ConfigError(f"there is no training script; name one, for example: {example} --nodes 2 -- train.py")
    parsed = parse_command(command)
    _check_script(parsed, settings["directives"])
    name = parsed.args.training_script
    run_id = settings.pop("run_id") or env.clean_name(Path(name).stem)
    run_dir = Path(settings.pop("run_dir") or Path("outlast-runs") / run_id).absolute()
    exclude = settings.pop("exclude")
    known = {field.name for field in dataclasses.fields(BatchScript)}
    assert settings.keys() <= known
    try:
        script = BatchScript(
            command=command,
            run_id=run_id,
            run_dir=str(run_dir),
            exclude=expand_nodes(exclude) if exclude else (),
            **settings,
        )
        check_values([f"--nnodes={script.nodes}:{script.nodes + script.spares}", *command])
    except ConfigError as error:
        raise ConfigError(_in_options(str(error))) from None
    words = [word.partition("=")[0] for word in parsed.args.training_script_args]
    ours = tuple(dict.fromkeys(word for word in words if word in _CLEARLY_OURS))
    for hint in (parsed.hint, hint_at(ours, name, click.get_current_context().command_path)):
        if hint is not None:
            echo(f"outlast: {hint}", err=True)
    for warning in script.warnings:
        echo(f"outlast: {_in_options(warning)}", err=True)
    return script


def _in_options(text: str) -> str:
    """Return a line in which the names of settings are replaced by those of their options."""
    from outlast.config.base import as_written

    words = [names.split() for names, *_ in _OPTIONS]
    options = {names[-1].removeprefix("--").replace("-", "_"): names[0] for names in words}
    text = as_written(text, lambda field, value: f"{options[field]}={value}" if field in options else None)
    for field in (field for field in options if "_" in field):
        text = re.sub(rf"(?<![\w/.-]){field}(?![\w/.=-])", options[field], text)
    return text


def _check_script(command: RunCommand, directives: tuple[str, ...]) -> None:
    """Refuse a training script that is not there; a module, or a program without a folder, is the nodes' own."""
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
