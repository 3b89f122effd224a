"""``outlast slurm``: batch scripts for a run, and what they call."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outlast import env, logs
from outlast.errors import ConfigError, ExitReason, OutlastError

if TYPE_CHECKING:
    from outlast.integrations.slurm import BatchScript

__all__ = ["slurm"]

_HELP = {"help_option_names": ["-h", "--help"]}


@click.group("slurm", context_settings=_HELP)
def slurm() -> None:
    """Run under Slurm: make and submit batch scripts, give a job back to the queue."""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a batch script."""
    add: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
        click.option("--nodes", type=int, default=1, show_default=True, help="Nodes that train."),
        click.option(
            "--spares", type=int, default=0, show_default=True, help="Nodes that wait for the slot of a lost one."
        ),
        click.option("--nproc-per-node", default="auto", show_default=True, help="Workers: a number, auto, gpu, cpu."),
        click.option("--run-id", metavar="ID", help="Names the run in every job of it; default: the script's name."),
        click.option("--run-dir", metavar="DIR", help="Shared by all nodes; default outlast-runs/ID."),
        click.option("--job-name", metavar="NAME", help="Default: the run's id."),
        click.option("--time", metavar="LIMIT", help="Time limit: 90, 4:00:00, 2-00; default the partition's."),
        click.option(
            "--preempt-time",
            type=int,
            default=60,
            show_default=True,
            metavar="SECONDS",
            help="Tell the workers to save and leave this long before the end; 0 = do not.",
        ),
        click.option(
            "--num-job-retries-on-failure",
            type=int,
            default=2,
            show_default=True,
            metavar="N",
            help="Failed jobs in a row, without progress, that go back to the queue.",
        ),
        click.option("--partition", metavar="NAME"),
        click.option("--account", metavar="NAME"),
        click.option("--qos", metavar="NAME"),
        click.option("--gpus-per-node", metavar="N", help="A number, or a type and a number (h100:8)."),
        click.option("--cpus-per-task", type=int, metavar="N", help="CPUs of a node, for all its workers."),
        click.option("--mem", metavar="SIZE"),
        click.option("--exclude", metavar="NODES", help="Nodes to keep away from, such as n[3-5],n9."),
        click.option("--directive", "directives", multiple=True, metavar="OPTION", help="More for #SBATCH; repeat."),
        click.option("--setup", multiple=True, metavar="LINE", help="Shell line before the job's step; repeat."),
        click.option("--port", type=int, default=0, help="Where agents meet; default from the job's number."),
        click.option("--outlast", default="outlast", show_default=True, metavar="PATH", help="Command on the nodes."),
        click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED),
    ]
    for option in reversed(add):
        command = option(command)
    return command


_CONTEXT = {**_HELP, "ignore_unknown_options": False, "allow_interspersed_args": False}
_EXAMPLES = """\b
Examples:
  outlast slurm {0} --nodes 4 --time 4:00:00 -- train.py --lr 3e-4
  outlast slurm {0} --nodes 4 --spares 1 --gpus-per-node 8 --nproc-per-node 8 -- \\
      --ft-rank_section_timeouts=setup:600,step:180,checkpointing:420 train.py
  outlast slurm {0} --nodes 2 --setup 'source venv/bin/activate' --directive=--constraint=ib -- train.py
"""


@slurm.command("script", context_settings=_CONTEXT, epilog=_EXAMPLES.format("script"))
@_options
def script(**settings: Any) -> int:
    """Print the batch script of a job.

    COMMAND is what follows `outlast run` and the options made here: more of its options, the training script, the
    script's arguments. It is checked as `outlast run` will check it.
    """
    click.echo(_script_from(settings).render(), nl=False)
    return int(ExitReason.FINISHED)


@slurm.command("submit", context_settings=_CONTEXT, epilog=_EXAMPLES.format("submit"))
@_options
def submit(**settings: Any) -> int:
    """Submit a job of a run, and print its number.

    Nodes that earlier jobs of the run found to be bad are excluded. The script is kept as job.sbatch in the run
    directory, beside the jobs' output. Exit code 1: Slurm refused, or the run is finished.
    """
    from outlast.integrations.slurm.submitting import submit as hand_over

    _log_to_stderr()
    try:
        job_id = hand_over(_script_from(settings))
    except ConfigError:
        raise
    except OutlastError as error:
        click.echo(f"outlast: {error}", err=True)
        return int(ExitReason.FAILED)
    click.echo(job_id)
    return int(ExitReason.FINISHED)


@slurm.command(
    "requeue",
    context_settings=_HELP,
    epilog="""\b
Examples (in a batch script):
  srun ... ; code=$?
  outlast slurm requeue --run-dir=/shared/run --exit-code="$code"; exit "$code"
""",
)
@click.option("--run-dir", required=True, metavar="DIR", help="The run directory.")
@click.option("--exit-code", required=True, type=click.IntRange(0, 255), help="Of the job's step.")
@click.option("--job-id", metavar="ID", help="Default: the job that this runs in.")
@click.option(
    "--num-job-retries-on-failure",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    metavar="N",
    help="Failed jobs in a row, without progress, that go back to the queue.",
)
def requeue(run_dir: str, exit_code: int, job_id: str | None, num_job_retries_on_failure: int) -> int:
    """Give an ended job back to the queue if that can help.

    Back go jobs that were told to leave (75, or 128 and a signal), as often as it takes; failures (16, 18, 19 and all
    others) at most N times in a row without progress; never finished runs (0) and what needs a person (2, 17, 93).

    Exit code 0: done as decided, either way; 1: Slurm or the run directory refused; 2: bad input.
    """
    from outlast.integrations.slurm.requeueing import end_job
    from outlast.runtime.slurm_job import get_slurm_info

    _log_to_stderr()
    if job_id is None:
        info = get_slurm_info()
        if info is None:
            raise ConfigError("this runs in no Slurm job; name one with --job-id")
        job_id = info.job_id
    try:
        ruling = end_job(
            Path(run_dir).absolute(), job_id, exit_code, num_job_retries_on_failure=num_job_retries_on_failure
        )
    except ConfigError:
        raise
    except (OutlastError, OSError) as error:
        click.echo(f"outlast: job {job_id} is not given back: {error}", err=True)
        return int(ExitReason.FAILED)
    what = "goes back to the queue" if ruling.requeue else "is not re-queued"
    logging.getLogger(logs.OUTCOME).info("Slurm job %s %s: %s", job_id, what, ruling.reason)
    return int(ExitReason.FINISHED)


def _script_from(settings: dict[str, Any]) -> BatchScript:
    from outlast.integrations.slurm import BatchScript
    from outlast.slurm_notation import expand_nodes

    command = tuple(settings.pop("command"))
    name = _check_command(command)
    run_id = settings.pop("run_id") or env.clean_name(Path(name).stem)
    run_dir = Path(settings.pop("run_dir") or Path("outlast-runs") / run_id).absolute()
    exclude = settings.pop("exclude")
    known = {field.name for field in dataclasses.fields(BatchScript)}
    assert settings.keys() <= known
    return BatchScript(
        command=command,
        run_id=run_id,
        run_dir=str(run_dir),
        exclude=expand_nodes(exclude) if exclude else (),
        **settings,
    )


def _check_command(command: tuple[str, ...]) -> str:
    """Return the training script's name; refuse what `outlast run` would refuse."""
    from outlast.launch.options import make_parser

    parser = make_parser()
    args, unknown = parser.parse_known_args(list(command))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    from outlast.config.flags import ft_config_from

    ft_config_from(args)
    return str(args.training_script)


def _log_to_stderr() -> None:
    logs.read_settings()
    logs.configure("slurm")
