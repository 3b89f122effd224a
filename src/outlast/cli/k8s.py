"""``outlast k8s``: manifests that run a job on Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from outlast.cli.job_command import CONTEXT, Option, field_of, in_options, job_options, parse_words, show_hints
from outlast.cli.main import CommandGroup, ScriptCommand, complete_file, echo, failing_in_one_line, json_option
from outlast.errors import ConfigError, ExitReason
from outlast.integrations.kubernetes import KubernetesJob, as_yaml


@click.group("k8s", cls=CommandGroup)
def k8s() -> None:
    """Run on Kubernetes: make the manifest of a job.

    Examples:
      outlast k8s manifest --image registry/train:1 --nnodes 4:5 --run-claim runs -- train.py | kubectl apply -f -
    """


_OPTIONS: tuple[Option, ...] = (
    ("--name", "NAME", "Names the job and the run; default: the script's name."),
    ("--image", "IMAGE", "The container's image, with outlast and the training script in it."),
    ("--run-claim", "CLAIM", "PersistentVolumeClaim of the run directory; all pods write there."),
    ("--kind", "KIND", "JobSet, TrainJob (Kubeflow Trainer) or PyTorchJob (Training Operator)."),
    ("--nnodes", "N|MIN:MAX", "Nodes; of MIN:MAX, MIN train and the others wait as spares."),
    ("--nproc-per-node", "N", "Workers on a node: a number, auto, gpu, xpu or cpu."),
    ("--min-nodes", "N", "Fewest nodes with which the job continues; default: it does not shrink."),
    ("--namespace", "NAME", "Namespace of the job; default: the current one of kubectl."),
    ("--run-id", "ID", "Names the run in every job of it; default: the job's name."),
    ("--mount-path", "DIR", "Where the volume of the run directory is mounted."),
    ("--run-key-secret", "SECRET", "Secret that holds the run key as run.key."),
    ("--gpus-per-node", "N", "GPUs of a pod."),
    ("--gpu-resource", "KEY", "What the cluster calls a GPU."),
    ("--cpus", "QUANTITY", "CPUs of a pod: 32, 500m."),
    ("--memory", "QUANTITY", "Memory of a pod, with /dev/shm and checkpoints in memory: 512Gi."),
    ("--resource resources", "KEY=QUANTITY", "More resources of a pod, such as rdma/ib=1; repeat."),
    ("--shm-size", "QUANTITY", "Limit of /dev/shm, which counts as memory; default the pod's memory."),
    ("--port", "N", "Where the agents meet."),
    ("--num-endpoints", "N", "How many of the first pods may host the coordinator."),
    ("--shutdown-grace", "SECONDS", "For workers to save after SIGTERM; the pod gets 30 more."),
    ("--join-timeout", "SECONDS", "How long agents wait for each other: pods may be pending for long."),
    (
        *("--num-job-retries-on-failure", "N"),
        "How often the job is made again after a failure, in all.",
    ),
    ("--pod-retries", "N", "Pods that may fail by themselves first; default: as many as spares."),
    ("--share-nodes", "", "Several pods of the job may run on one machine."),
    ("--topology", "KEY", "All pods go where this label of machines has the same value."),
    ("--node-selector", "KEY=VALUE", "Label that machines must have; repeat."),
    ("--toleration tolerations", "KEY[=VALUE]", "Taint of machines that does not matter; repeat."),
    ("--volume volumes", "KIND:NAME:DIR", "claim:NAME:DIR, configmap:NAME:DIR or secret:NAME:DIR; repeat."),
    ("--env", "NAME=VALUE", "Environment variable, not for secrets; repeat."),
    ("--image-pull-secret image_pull_secrets", "SECRET", "Credentials of the image's registry; repeat."),
    ("--metrics-port", "N", "Export metrics for Prometheus from each pod at this port."),
    ("--run-as-user", "UID", "User of the container; default the image's."),
    ("--run-as-group", "GID", "Group of the container; default the image's."),
    ("--run-as-non-root", "", "Kubernetes refuses to start the container as root."),
    ("--fs-group", "GID", "Group of the volumes, so that a user other than root can write to them."),
    ("--capability capabilities", "NAME", "Linux capability, such as IPC_LOCK; all others are dropped; repeat."),
    (
        *("--allow-privilege-escalation", ""),
        "A process may get more privileges than its parent (setuid).",
    ),
    ("--seccomp-profile", "NAME", "RuntimeDefault or Unconfined; default the cluster's."),
    ("--service-account", "NAME", ""),
    ("--priority-class", "NAME", ""),
    ("--queue", "NAME", "Kueue's local queue."),
    ("--working-dir", "DIR", "Where the script starts; default the image's."),
    ("--outlast", "COMMAND", "What is outlast in the image, such as 'uv run outlast'."),
)


@k8s.command(
    "manifest",
    cls=ScriptCommand,
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  outlast k8s manifest --image registry/train:1 --nnodes 4:5 --gpus-per-node 8 --run-claim runs \\
      -- train.py --lr 3e-4 | kubectl apply -f -
  outlast k8s manifest --kind TrainJob --image registry/train:1 --nnodes 4 --run-claim runs -o job.yaml -- train.py
  outlast k8s manifest --image registry/train:1 --image-pull-secret regcred --nnodes 4 --gpus-per-node 8 \\
      --cpus 96 --memory 1Ti --shm-size 256Gi --run-claim runs \\
      --run-as-user 1000 --fs-group 1000 --metrics-port 9465 \\
      -- --config /etc/outlast/gpt.toml train.py
""",
)
@job_options(_OPTIONS, KubernetesJob)
@json_option
@click.option(
    *("-o", "--output"), metavar="FILE", shell_complete=complete_file, help="Write to a file; default standard output."
)
def manifest(as_json: bool, output: str | None, **settings: Any) -> int:
    """Print the manifest of a job, for `kubectl apply -f -`.

    What follows the options made here is what `outlast run` gets in each pod: more of its options, the training script,
    the script's arguments. It is checked as `outlast run` will check it; files are the image's, and are not looked for.
    """
    job = _job_from(settings)
    made = job.manifests()
    if as_json:
        import msgspec

        shown: Any = made[0] if len(made) == 1 else {"apiVersion": "v1", "kind": "List", "items": made}
        text = msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n"
    else:
        text = as_yaml(made)
    if output is None:
        click.echo(text, nl=False)
    else:
        with failing_in_one_line(f"{output} is not written: ", OSError):
            Path(output).write_text(text, encoding="utf-8")
    return int(ExitReason.FINISHED)


def _job_from(settings: dict[str, Any]) -> KubernetesJob:
    """Make the job from options; print hints and warnings on standard error.

    Raises:
        ConfigError: `outlast run` or Kubernetes would refuse a value.
    """
    from outlast.launch.options import check_values

    settings["command"] = command = tuple(settings["command"])
    parsed = parse_words(command, "--nnodes 2 ...")
    options = {field_of(names): names.split()[0] for names, *_ in _OPTIONS}
    path = click.get_current_context().command_path
    for field, what in (
        ("image", "the image with outlast and the script"),
        ("run_claim", "the run directory's volume"),
    ):
        if not settings[field]:
            raise ConfigError(f"{options[field]} is missing; name {what}, for example: {path} {_EXAMPLE} -- train.py")
    stem = Path(parsed.args.training_script).stem.lower()
    settings["name"] = settings["name"] or re.sub(r"[^a-z0-9-]+", "-", stem).strip("-") or "train"
    kinds = {kind.lower(): kind for kind in ("JobSet", "TrainJob", "PyTorchJob")}
    settings["kind"] = kinds.get(settings["kind"].lower(), settings["kind"])
    try:
        job = KubernetesJob(**settings)
        config = parsed.args.config
        looked_for = config is None or Path(config).exists()
        words = command if looked_for else _without_config(command, config)
        check_values([f"--nnodes={job.nnodes}", "--rdzv-endpoint=pod-0:29400", *words])
    except ConfigError as error:
        raise ConfigError(in_options(str(error), _OPTIONS)) from None
    if not looked_for:
        echo(f"outlast: {config} is not here; its values are not checked before the pods start", err=True)
    show_hints(parsed, _CLEARLY_OURS, _OPTIONS, job.warnings)
    return job


_EXAMPLE = "--image registry/train:1 --run-claim runs"
_CLEARLY_OURS = frozenset(["--image", "--run-claim", "--nnodes", "--gpus-per-node", "--run-key-secret"])
"""Options that a training script is unlikely to have."""


def _without_config(command: tuple[str, ...], config: str) -> list[str]:
    """Return the words without ``--config``, whose file is only in the image."""
    words = list(command)
    if f"--config={config}" in words:
        words.remove(f"--config={config}")
    else:
        at = next(number for number, word in enumerate(words) if word == config and words[number - 1] == "--config")
        del words[at - 1 : at + 1]
    return words
