"""Train a small GPT through NeMo-Run, with outlast's plug-ins; with --simulate-fault, recover from a fault.

On this machine, with two ranks, or on Slurm, from a login node (``outlast shims`` has written ft_launcher for it)::

    python launch.py --simulate-fault
    python launch.py --account research --partition batch --nodes 2 --ranks 8 --shims /shared/shims --dir /shared/gpt

Needs ``pip install 'outlast[nemo-run]'``. Checkpoints, result and NeMo-Run's own files are stored in --dir.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import nemo_run as run

from outlast.integrations.nemo_run import FaultTolerancePlugin, PreemptionPlugin

TRAIN = Path(__file__).resolve().parents[1] / "train_gpt.py"


def no_arguments(_args: object) -> list[str]:
    """Do not pass hydra-style overrides, which train_gpt.py does not parse."""
    return []


def make_executor(args: argparse.Namespace) -> run.Executor:
    """Return the executor: a cluster if an account is given, otherwise this machine."""
    if args.account is None:
        return run.LocalExecutor(ntasks_per_node=args.ranks)
    return run.SlurmExecutor(
        account=args.account,
        partition=args.partition,
        nodes=args.nodes,
        ntasks_per_node=args.ranks,
        time="04:00:00",
        tunnel=run.LocalTunnel(job_dir=str(args.dir / "experiments")),
        packager=run.Packager(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where everything goes; a new temporary folder by default")
    parser.add_argument("--iterations", default="60")
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument("--simulate-fault", action="store_true", help="a rank is killed or stopped, once")
    parser.add_argument("--account", help="run on Slurm, charged to this account")
    parser.add_argument("--partition")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--shims", help="folder with ft_launcher on the nodes")
    args = parser.parse_args()
    args.dir = (args.dir or Path(tempfile.mkdtemp(prefix="nemo_run."))).absolute()
    args.dir.mkdir(parents=True, exist_ok=True)
    print("checkpoints and result go to", args.dir, flush=True)

    words = ["--iterations", args.iterations, "--save-interval", "4"]
    words += ["--checkpoint-dir", str(args.dir / "checkpoints"), "--out", str(args.dir / "result.json")]
    task = run.Script(path=str(TRAIN), entrypoint="python", args=words)
    executor = make_executor(args)
    if args.simulate_fault:
        executor.env_vars["OUTLAST_FT_SIMULATE_FAULT"] = "true"
    plugins = [
        FaultTolerancePlugin(
            rank_section_timeouts="setup:120,step:30,checkpointing:60",
            rank_out_of_section_timeout=60,
            shims=args.shims,
            script_args_converter_fn=no_arguments,
        ),
        PreemptionPlugin(script_args_converter_fn=no_arguments),
    ]
    with run.Experiment("gpt", executor=executor, base_dir=str(args.dir)) as experiment:
        experiment.add(task, plugins=plugins, name="train_gpt", tail_logs=True)
        experiment.run(detach=args.account is not None)
    if args.account is None and experiment.jobs[0].state.name != "SUCCEEDED":  # NeMo-Run does not fail itself
        sys.exit(1)


if __name__ == "__main__":
    main()
