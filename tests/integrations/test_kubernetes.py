"""Kubernetes manifests: validated by its models, with the right reaction to each exit code, and run as pods."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import DOCS, python_blocks, run_python
from pods import Pods, can_create, expand

from outlast.cli.main import cli
from outlast.errors import ConfigError, ExitReason
from outlast.integrations import kubernetes
from outlast.integrations.kubernetes import KubernetesJob, as_yaml

MINIMAL: dict[str, Any] = {"command": ("train.py",), "name": "gpt", "image": "registry/train:1", "run_claim": "runs"}
FULL: dict[str, Any] = MINIMAL | {
    "command": ("--max-restarts=5", "train.py", "--lr", "$(NODE_NAME) 'a b'"),
    "nnodes": "4:6",
    "nproc_per_node": "8",
    "min_nodes": 3,
    "namespace": "ml",
    "run_key_secret": "gpt-key",
    "gpus_per_node": 8,
    "cpus": "64",
    "memory": "1Ti",
    "resources": ("rdma/ib=1", "ephemeral-storage=10Gi"),
    "shm_size": "64Gi",
    "topology": "topology.kubernetes.io/zone",
    "node_selector": ("gpu=h100",),
    "tolerations": ("nvidia.com/gpu", "team=ml"),
    "volumes": ("claim:data:/data", "configmap:gpt:/etc/outlast", "secret:s3:/etc/s3"),
    "env": ("LEVEL=$(HOME)", "EMPTY="),
    "image_pull_secrets": ("regcred", "mirror"),
    "metrics_port": 9465,
    "run_as_user": 1000,
    "run_as_group": 1000,
    "run_as_non_root": True,
    "fs_group": 2000,
    "capabilities": ("IPC_LOCK", "SYS_ADMIN"),
    "allow_privilege_escalation": True,
    "seccomp_profile": "RuntimeDefault",
    "service_account": "trainer",
    "priority_class": "high",
    "queue": "training",
    "working_dir": "/work",
    "outlast": "uv run outlast",
}


def job_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the Job within a JobSet or a TrainingRuntime."""
    spec = manifests[0]["spec"]
    found = spec.get("template", {}).get("spec", spec)["replicatedJobs"][0]["template"]
    job: dict[str, Any] = found["spec"]
    return job


def pod_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod specification."""
    if manifests[0]["kind"] == "PyTorchJob":
        pod: dict[str, Any] = manifests[0]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        return pod
    pod = job_of(manifests)["template"]["spec"]
    return pod


def check_models(manifests: list[dict[str, Any]]) -> None:
    """Check that Kubeflow's models accept each object and reproduce it exactly."""
    from kubeflow_trainer_api import models

    for one in manifests:
        kinds = {
            "JobSet": models.JobsetV1alpha2JobSetSpec,
            "TrainingRuntime": models.TrainerV1alpha1TrainingRuntimeSpec,
            "TrainJob": models.TrainerV1alpha1TrainJobSpec,
        }
        metadata = models.IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(one["metadata"])
        assert metadata is not None
        assert metadata.to_dict() == one["metadata"]
        if one["kind"] == "PyTorchJob":  # only the pod has a published model
            specs = [replica["template"] for replica in one["spec"]["pytorchReplicaSpecs"].values()]
            for spec in specs:
                pod = models.IoK8sApiCoreV1PodTemplateSpec.from_dict(spec)
                assert pod is not None
                assert json.loads(pod.to_json()) == spec
            continue
        model = kinds[one["kind"]].from_dict(one["spec"])
        assert model is not None
        assert json.loads(model.to_json()) == one["spec"]


# -- manifests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", "PyTorchJob"])
@pytest.mark.parametrize("given", [MINIMAL, FULL], ids=["least", "most"])
def test_kubeflow_models_accept_every_key(kind: Any, given: dict[str, Any]) -> None:
    """Every key is known to the published models, with a value of its type."""
    check_models(KubernetesJob(**given, kind=kind).manifests())


LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
QUANTITIES = st.from_regex(r"[1-9][0-9]{0,3}(Mi|Gi)?", fullmatch=True)


@pytest.mark.extended
@settings(max_examples=20)
@given(
    name=LABELS,
    kind=st.sampled_from(["JobSet", "TrainJob", "PyTorchJob"]),
    min_nodes=st.integers(1, 3000),
    spares=st.integers(0, 50),
    words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=4),
    options=st.fixed_dictionaries(
        {},
        optional={
            "gpus_per_node": st.integers(1, 16),
            "memory": QUANTITIES,
            "cpus": QUANTITIES,
            "shm_size": QUANTITIES,
            "run_key_secret": LABELS,
            "num_endpoints": st.integers(1, 9),
            "shutdown_grace": st.floats(0, 1e5),
            "num_job_retries_on_failure": st.integers(0, 9),
            "share_nodes": st.booleans(),
            "topology": st.just("topology.kubernetes.io/rack"),
            "env": st.lists(LABELS, max_size=3, unique=True).map(
                lambda names: tuple(f"{n.replace('-', '_')}={n}" for n in names)
            ),
            "port": st.integers(1, 65535),
            "namespace": LABELS,
            "metrics_port": st.integers(1, 65535),
            "image_pull_secrets": st.lists(LABELS, max_size=2).map(tuple),
            "fs_group": st.integers(0, (1 << 31) - 1),
            "capabilities": st.sampled_from([(), ("IPC_LOCK",), ("IPC_LOCK", "SYS_PTRACE")]),
        },
    ),
)
def test_any_valid_options_make_valid_manifests(
    name: str, kind: Any, min_nodes: int, spares: int, words: list[str], options: dict[str, Any]
) -> None:
    """Any accepted options make valid objects with the right grace period, endpoints and script arguments."""
    command = ("train.py", *words)
    names = [one.partition("=")[0] for one in options.get("env", ())]
    if len(set(names)) < len(names) or options.get("metrics_port") == options.get("port", 29400):
        return
    if {"memory", "shm_size"} <= options.keys():
        options["shm_size"] = options["memory"]
    job = KubernetesJob(
        **MINIMAL | options | {"name": name, "command": command}, kind=kind, nnodes=f"{min_nodes}:{min_nodes + spares}"
    )
    made = job.manifests()
    check_models(made)
    pod = pod_of(made)
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] >= job.shutdown_grace + 30
    args = expand(container["args"], {"NODE_NAME": "m1", "JOB_COMPLETION_INDEX": "0"})
    assert args[len(args) - len(command) :] == list(command)
    hosts = re.findall(r"--rdzv-endpoint=(\S+)", " ".join(args[: len(args) - len(command)]))
    assert len(hosts) == (1 if min_nodes + spares > 1 else 0)
    for host in hosts[0].split(",") if hosts else ():
        stem, _, port = host.rpartition(":")
        assert int(port) == job.port
        assert len(stem.split(".")[0]) <= 63
    if kind != "PyTorchJob":
        spec = job_of(made)
        assert spec["completions"] == spec["parallelism"] == min_nodes + spares
        assert spec["successPolicy"]["rules"][0]["succeededCount"] == min_nodes
    assert yaml.safe_load(as_yaml(made).split("\n---\n")[0]) == made[0]


OTHER_TYPES = [
    re.compile(rule)
    for rule in (
        r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+",  # YAML 1.2
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        r"~|null|Null|NULL|true|True|TRUE|false|False|FALSE|",
        r"y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF|<<|=",  # YAML 1.1
        r"[-+]?(0b[0-1_]+|0[0-7_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)",
        r"[-+]?([0-9][0-9_]*)?\.[0-9._]*([eE][-+]?[0-9]+)?",
        r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?",
    )
]


def unquoted_strings(node: yaml.Node, value: Any) -> Iterator[str]:
    """Return the strings of a value that a document contains without quotes."""
    if isinstance(value, dict):
        assert isinstance(node, yaml.MappingNode)
        for (key_node, value_node), (key, one) in zip(node.value, value.items(), strict=True):
            yield from (*unquoted_strings(key_node, key), *unquoted_strings(value_node, one))
    elif isinstance(value, list):
        assert isinstance(node, yaml.SequenceNode)
        for one_node, one in zip(node.value, value, strict=True):
            yield from unquoted_strings(one_node, one)
    elif isinstance(value, str):
        assert isinstance(node, yaml.ScalarNode)
        assert node.value == value
        if node.style is None:
            yield value


AMBIGUOUS_STRINGS = (
    "3e-4",
    "1e5",
    "0o17",
    "0x_1",
    "1_0",
    "y",
    "n",
    "No",
    "ON",
    "~",
    ".inf",
    "-.INF",
    ".nan",
    "1:30",
    "=",
)


@pytest.mark.extended
@settings(max_examples=100)
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(AMBIGUOUS_STRINGS),
            st.text("0123456789+-.eExXoObBtT_:~yYnNuUlLaAsSfFiI", max_size=6),
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
        ),
        max_size=5,
    ),
)
def test_strings_are_not_parsed_as_other_yaml_types(words: list[str]) -> None:
    """Arguments and variables are strings for YAML 1.1 and 1.2: unquoted text matches none of their other types."""
    env = tuple(f"V{number}={word}" for number, word in enumerate(words))
    made = KubernetesJob(**MINIMAL | {"command": ("train.py", *words), "env": env}).manifests()
    text = as_yaml(made)
    assert list(yaml.safe_load_all(text)) == made
    plain = list(unquoted_strings(yaml.compose(text), made[0]))
    assert "train.py" in plain
    assert [one for one in plain if any(rule.fullmatch(one) for rule in OTHER_TYPES)] == []


def test_exit_codes_select_the_right_job_rule() -> None:
    """A requested shutdown is not counted, fatal codes end the job, and other codes are counted."""
    policy = job_of(KubernetesJob(**MINIMAL).manifests())["podFailurePolicy"]["rules"]

    def action(code: int, condition: str | None = None) -> str:
        for rule in policy:
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
            if condition in [one["type"] for one in rule.get("onPodConditions", ())]:
                return str(rule["action"])
        return "Count"

    expected = dict.fromkeys(ExitReason, "Count") | {
        ExitReason.BAD_INPUT: "FailJob",
        ExitReason.FAILED_VALIDATION: "FailJob",
        ExitReason.NO_PROGRESS: "FailJob",
        ExitReason.PREEMPTED: "Ignore",
    }
    expected.pop(ExitReason.FINISHED)
    assert {code: action(code) for code in expected} == expected
    assert action(128 + signal.SIGTERM) == action(128 + signal.SIGINT) == "Ignore"
    assert action(128 + signal.SIGKILL) == "Count"
    assert action(128 + signal.SIGKILL, "DisruptionTarget") == "Ignore"
    for rule in policy:
        values = rule.get("onExitCodes", {}).get("values", [])
        assert values == sorted(set(values))  # the API rejects other orders
    spec = KubernetesJob(**MINIMAL).manifests()[0]["spec"]
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", spec["failurePolicy"]["rules"][0]["name"])


def test_run_key_is_mounted_and_not_in_the_manifest() -> None:
    """The run key is mounted from a Secret; neither command line nor environment contains it."""
    pod = pod_of(KubernetesJob(**MINIMAL, run_key_secret="gpt-key").manifests())
    (container,) = pod["containers"]
    assert "--run-key-file=/etc/outlast-run-key/run.key" in container["args"]
    assert [one["name"] for one in container["env"]] == ["NODE_NAME"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "run-key"]
    assert volume["secret"]["items"] == [{"key": "run.key", "path": "run.key"}]
    with pytest.raises(ConfigError, match="run_key_secret"):
        KubernetesJob(**MINIMAL, env=("OUTLAST_RUN_KEY=0123456789abcdef",))


def test_container_has_no_privileges_by_default() -> None:
    """By default all capabilities are dropped, and user and groups are the image's; options change that."""
    pod = pod_of(KubernetesJob(**MINIMAL).manifests())
    dropped = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["containers"][0]["securityContext"] == dropped
    assert "securityContext" not in pod
    pod = pod_of(KubernetesJob(**FULL).manifests())
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": True,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK", "SYS_ADMIN"]},
    }
    assert pod["securityContext"] == {
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 2000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", "PyTorchJob"])
def test_image_pull_secrets_and_metrics_annotations(kind: Any) -> None:
    """Pods have the Secrets for their image, and with a metrics port the annotations for a scraper."""
    made = KubernetesJob(**MINIMAL, kind=kind, image_pull_secrets=("regcred",), metrics_port=9465).manifests()
    pod = pod_of(made)
    assert pod["imagePullSecrets"] == [{"name": "regcred"}]
    (container,) = pod["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"metrics": 9465} | ({"pytorchjob-port": 29400} if kind == "PyTorchJob" else {})
    assert {"--metrics-port=9465", "--metrics-address=0.0.0.0"} <= set(container["args"])
    text = json.dumps(made)
    annotations = {"scrape": "true", "port": "9465", "path": "/metrics"}
    assert all(f'"prometheus.io/{name}": "{value}"' in text for name, value in annotations.items())
    job_with_address = KubernetesJob(
        **MINIMAL | {"command": ("--metrics-address=::", "train.py")}, kind=kind, metrics_port=9465
    )
    assert "--metrics-address=0.0.0.0" not in job_with_address.run_arguments
    assert not {"ports", "annotations"} & set(re.findall(r"\w+", json.dumps(KubernetesJob(**MINIMAL).manifests())))


def test_missing_cpu_and_memory_requests_are_logged(tmp_path: Path) -> None:
    """One line is logged for each amount that the pods do not request."""
    for words, fields in (
        ([], ["--cpus", "--memory"]),
        (["--cpus=8"], ["--memory"]),
        (["--resource=cpu=8", "--memory=1Gi"], []),
    ):
        done = invoke(*REQUIRED_OPTIONS, *words, "train.py")
        lines = done.stderr.splitlines()
        assert [line.partition(": the pods request none")[0] for line in lines] == [f"outlast: {one}" for one in fields]


def test_train_job_refers_to_its_runtime() -> None:
    """A TrainJob refers to its runtime, whose job has the label and the container that Trainer expects."""
    runtime, job = KubernetesJob(**MINIMAL, kind="TrainJob", nnodes="2:3").manifests()
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["name"] == replicated["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 3
    assert job["metadata"]["name"] == "gpt"
    assert (
        "--rdzv-endpoint=gpt-node-0-0.gpt:29400,gpt-node-0-1.gpt:29400,gpt-node-0-2.gpt:29400"
        in (job["spec"]["trainer"]["args"])
    )


def exit_code_wrapper() -> list[str]:
    """Return the shell's options that translate the agent's exit code for a PyTorchJob."""
    (container,) = pod_of(KubernetesJob(**MINIMAL, kind="PyTorchJob").manifests())["containers"]
    return expand(container["args"], {})[:3]


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "expected_code"), [(0, 0), (75, 203), (1, 129), (18, 146), (2, 2), (17, 17), (93, 93)]
)
def test_pytorch_job_exit_codes_select_retries(code: int, expected_code: int, tmp_path: Path) -> None:
    """Codes after which a PyTorchJob must restart a pod are above 127, others are unchanged."""
    done = subprocess.run(["sh", *exit_code_wrapper(), "sh", "-c", f"exit {code}"], check=False, timeout=300)
    assert done.returncode == expected_code


@pytest.mark.process
def test_pytorch_job_forwards_sigterm(tmp_path: Path) -> None:
    """SIGTERM to the shell reaches the agent, whose exit code is returned."""
    agent = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "sys.exit(75)\n"
    )
    with subprocess.Popen(
        ["sh", *exit_code_wrapper(), sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.wait(60) == 75 + 128


@pytest.mark.process
def test_pytorch_job_forwards_an_early_sigterm(tmp_path: Path) -> None:
    """SIGTERM before the shell knows the agent's pid is not lost."""
    option, script, _ = exit_code_wrapper()
    os.mkfifo(tmp_path / "ready")
    early = script.replace("& p=$!", f"& kill -TERM $$; read ready < {tmp_path}/ready; p=$!")
    assert early != script
    agent = f"trap 'exit 75' TERM; echo > {tmp_path}/ready; for turn in $(seq 500); do sleep 0.1; done; exit 9"
    done = subprocess.run(["sh", option, early, "sh", "sh", "-c", agent], timeout=300, check=False)
    assert done.returncode == 75 + 128


# -- invalid input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "text"),
    [
        ({"name": "GPT"}, "name='GPT' is not a valid name for Kubernetes"),
        ({"name": "1b"}, "name='1b' is not a valid name for Kubernetes"),
        ({"name": "a" * 60}, "is too long"),
        ({"nnodes": "5:4"}, "nnodes='5:4' is not N or MIN:MAX"),
        ({"nnodes": "0"}, "nnodes='0' is not N or MIN:MAX"),
        ({"kind": "Job"}, "kind='Job' is not JobSet, TrainJob or PyTorchJob"),
        ({"image": ""}, "image='' is not an image"),
        ({"run_claim": "Runs"}, "run_claim='Runs' is not a valid name"),
        ({"memory": "64GB"}, "memory='64GB' is not a quantity"),
        ({"gpus_per_node": 0}, "gpus_per_node=0 must be from 1"),
        ({"memory": "1Gi", "shm_size": "2G"}, "shm_size=2G is more than memory=1Gi"),
        ({"metrics_port": 0}, "metrics_port=0 must be from 1 to 65535"),
        ({"metrics_port": 29400}, "metrics_port=29400 is the port of the agents"),
        ({"command": ("--metrics-port=9465", "train.py")}, "--metrics-port is made from the manifest's metrics_port"),
        ({"command": ("--metrics-address=::", "train.py")}, "--metrics-address has no effect without metrics_port"),
        ({"image_pull_secrets": ("A b",)}, "image_pull_secrets='A b' is not a valid name"),
        ({"run_as_user": -1}, "run_as_user=-1 must be from 0 to 2147483647"),
        ({"run_as_user": 0, "run_as_non_root": True}, "run_as_user=0 is root, and contradicts run_as_non_root"),
        ({"run_as_user": 7, "run_key_secret": "a"}, "run_key_secret=a can be read by root and by fs_group only"),
        ({"run_as_non_root": True, "run_key_secret": "a"}, "set fs_group to a group id"),
        ({"capabilities": ("CAP_IPC_LOCK",)}, "capabilities='CAP_IPC_LOCK' is not a capability without CAP_"),
        ({"capabilities": ("SYS_ADMIN",)}, "grants 'SYS_ADMIN' only with allow_privilege_escalation"),
        ({"seccomp_profile": "off"}, "seccomp_profile='off' is not RuntimeDefault or Unconfined"),
        ({"min_nodes": 2}, "min_nodes=2 must be from 1 to the 1 of nnodes=1"),
        ({"volumes": ("data:/data",)}, "volumes='data:/data' is not in the form"),
        ({"volumes": ("claim:data:/runs",)}, "volumes: /runs has a volume already"),
        ({"volumes": ("claim:data:/data//x/", "claim:b:/data/./x")}, "volumes: /data/x has a volume already"),
        ({"volumes": ("claim:data:/a/../b",)}, "volumes='claim:data:/a/../b' is not in the form"),
        ({"volumes": ("claim:data:/",)}, "volumes='claim:data:/' is not in the form"),
        ({"mount_path": "/dev/./shm/"}, "mount_path='/dev/shm' is taken in the container"),
        ({"mount_path": "//"}, "mount_path='/' is taken in the container"),
        ({"mount_path": "/etc/outlast-run-key"}, "mount_path='/etc/outlast-run-key' is taken"),
        ({"cpus": "8", "resources": ("cpu=4",)}, "resources: 'cpu=4' conflicts with cpus=8; remove one of them"),
        ({"memory": "1Gi", "resources": ("memory=4",)}, "resources: 'memory=4' conflicts with memory=1Gi"),
        (
            {"gpus_per_node": 8, "gpu_resource": "amd.com/gpu", "resources": ("amd.com/gpu=4",)},
            "resources: 'amd.com/gpu=4' conflicts with gpus_per_node=8",
        ),
        ({"resources": ("a/b=1", "a/b=2")}, "resources: 'a/b=2' conflicts with a/b=1"),
        ({"node_selector": ("a=1", "a=2")}, "node_selector: a is there twice"),
        ({"shutdown_grace": 1e300}, "shutdown_grace=1e+300 must be from 0 to"),
        ({"env": ("A",)}, "env='A' is not in the form NAME=VALUE"),
        ({"env": ("A=1", "A=2")}, "env: A is there twice"),
        ({"node_selector": ("a b=c",)}, "node_selector='a b=c' is not in the form"),
        ({"tolerations": ("-=",)}, "tolerations='-=' is not in the form"),
        ({"resources": ("rdma",)}, "resources='rdma' is not in the form"),
        ({"topology": "a/b/c"}, "topology='a/b/c' is not a label's key"),
        ({"mount_path": "runs"}, "mount_path='runs' is not an absolute path"),
        ({"run_id": "none"}, "run_id='none' is not a run id"),
        ({"shutdown_grace": -1}, "shutdown_grace=-1 must be from 0 to"),
        ({"outlast": "'"}, 'outlast="\'" is not a command line'),
        ({"nproc_per_node": "0"}, "nproc_per_node='0' is not a number"),
        ({"kind": "PyTorchJob", "pod_retries": 1}, "pod_retries: a PyTorchJob has no such limit"),
        ({"command": ()}, "there is no training script"),
        ({"command": ("--nnodes=2", "train.py")}, "--nnodes is made from nnodes; leave it out"),
        ({"command": ("--rdzv_conf=a=1", "train.py")}, "--rdzv_conf is made from join_timeout"),
    ],
)
def test_invalid_values_are_rejected_by_name(invalid: dict[str, Any], text: str) -> None:
    """Values that Kubernetes or `outlast run` would reject later are rejected in one line with their name."""
    with pytest.raises(ConfigError, match=re.escape(text)) as raised:
        KubernetesJob(**MINIMAL | invalid)
    assert "\n" not in str(raised.value)


def test_paths_and_seconds_are_normalised() -> None:
    """Paths are normalised, and a long grace period is written in whole seconds, rounded up."""
    job = KubernetesJob(
        **MINIMAL,
        mount_path="//srv/./runs/",
        volumes=("claim:data:/data//x/",),
        shutdown_grace=1234567.5,
        working_dir="/w/",
    )
    pod = pod_of(job.manifests())
    (container,) = pod["containers"]
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/dev/shm", "/srv/runs", "/data/x"]
    assert container["workingDir"] == "/w"
    assert {"--run-dir=/srv/runs/gpt", "--ft-shutdown-grace=1234568"} <= set(container["args"])
    assert pod["terminationGracePeriodSeconds"] == 1234598


def invoke(*words: str) -> Result:
    """Run ``outlast k8s manifest`` in this process."""
    return CliRunner().invoke(cli, ["k8s", "manifest", *words], standalone_mode=False)


MAIN = "import sys; from outlast.cli.main import main; sys.exit(main())"
REQUIRED_OPTIONS = ("--image=registry/train:1", "--run-claim=runs")


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            (*REQUIRED_OPTIONS,),
            "there is no training script; name one, for example: outlast k8s manifest --nnodes 2 ... -- train.py",
        ),
        (("--run-claim=runs", "--", "train.py"), "--image is missing"),
        (("--image=a", "--", "train.py"), "--run-claim is missing"),
        ((*REQUIRED_OPTIONS, "--nnodes=4:2", "--", "train.py"), "--nnodes='4:2' is not N or MIN:MAX"),
        ((*REQUIRED_OPTIONS, "--nodes=4", "--", "train.py"), "no such option '--nodes'"),
        (
            (*REQUIRED_OPTIONS, "--max-restarts=4", "--", "train.py"),
            "--max-restarts is an option of outlast run; put it after --",
        ),
        ((*REQUIRED_OPTIONS, "--", "--max-restarts=-1", "train.py"), "--max-restarts=-1 must not be negative"),
        ((*REQUIRED_OPTIONS, "--gpus-per-node=a", "--", "train.py"), "is not a whole number"),
        ((*REQUIRED_OPTIONS, "--name=a_b", "--", "train.py"), "--name='a_b' is not a valid name for Kubernetes"),
        (
            (*REQUIRED_OPTIONS, "--run-as-user=7", "--run-key-secret=a", "--", "train.py"),
            "--run-key-secret=a can be read by root and by --fs-group only",
        ),
        (
            (*REQUIRED_OPTIONS, "--cpus=8", "--resource=cpu=4", "--", "train.py"),
            "--resource: 'cpu=4' conflicts with --cpus=8; remove one of them",
        ),
        ((*REQUIRED_OPTIONS, "--mount-path=/dev/shm", "--", "train.py"), "--mount-path='/dev/shm' is taken"),
        (
            (*REQUIRED_OPTIONS, "--cpus=8", "--memory=1Gi", "-o", "/nowhere/job.yaml", "--", "train.py"),
            "/nowhere/job.yaml is not written",
        ),
    ],
)
def test_usage_errors_are_one_line(words: tuple[str, ...], text: str) -> None:
    """Bad input is one line with the option names of the command line and exit code 2, or 1 for an unwritable file."""
    done = run_python("-c", MAIN, "k8s", "manifest", *words, code=1 if "not written" in text else 2)
    assert done.stdout == ""
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_yaml_json_and_file_output_are_equal(tmp_path: Path) -> None:
    """YAML, JSON and a file contain the same manifests."""
    words = [*REQUIRED_OPTIONS, "--kind=trainjob", "--nnodes=4:5", "--resource=rdma/ib=1", "--share-nodes"]
    command = ["--", "--max-restarts=5", "train.py", "--lr", "$(LR)"]
    path = tmp_path / "job.yaml"
    shown, as_json = invoke(*words, *command), invoke(*words, "--json", *command)
    written = invoke(*words, "-o", str(path), *command)
    expected = KubernetesJob(
        **MINIMAL | {"command": tuple(command[1:]), "name": "train"},
        kind="TrainJob",
        nnodes="4:5",
        resources=("rdma/ib=1",),
        share_nodes=True,
    ).manifests()
    assert list(yaml.safe_load_all(shown.stdout)) == expected
    assert json.loads(as_json.stdout) == {"apiVersion": "v1", "kind": "List", "items": expected}
    assert path.read_text() == shown.stdout
    assert written.stdout == ""


def test_config_file_of_the_image_is_logged_as_unchecked() -> None:
    """A config file of the image is passed on, and a line reports that it was not checked."""
    for words in (["--config", "/etc/outlast/gpt.toml"], ["--config=/etc/outlast/gpt.toml"]):
        done = invoke(*REQUIRED_OPTIONS, "--", *words, "train.py")
        assert done.exception is None
        assert "/etc/outlast/gpt.toml is not here; its values are not checked" in done.stderr
        (made,) = yaml.safe_load_all(done.stdout)
        assert pod_of([made])["containers"][0]["args"][-len(words) - 1 :] == [*words, "train.py"]


def test_missing_pyyaml_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML output without PyYAML is one line with the remedy."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"pip install 'outlast\[k8s\]', or take --json"):
        as_yaml([])


def test_every_field_has_an_option_and_an_effect() -> None:
    """Each field has an option, and changes the manifest."""
    from outlast.cli import k8s

    fields = set(KubernetesJob.__dataclass_fields__) - {"command"}
    assert {one.name for one in k8s.manifest.params} - {"command", "as_json", "output", "help"} == fields
    base = {"nnodes": "4:5"}
    changed = {**FULL, "kind": "TrainJob", "nnodes": "4:6", "run_id": "gpt-2", "mount_path": "/r", "port": 29500}
    changed |= {"gpu_resource": "amd.com/gpu", "num_endpoints": 1, "shutdown_grace": 90.0, "join_timeout": 60}
    changed |= {"num_job_retries_on_failure": 5, "pod_retries": 7, "share_nodes": True, "image": "b", "name": "b"}
    changed["run_claim"] = "other"
    for field in fields:
        needed: dict[str, dict[str, Any]] = {
            "gpu_resource": {"gpus_per_node": 1},
            "capabilities": {"allow_privilege_escalation": True},
        }
        before = base | needed.get(field, {})
        plain = KubernetesJob(**MINIMAL | before).manifests()
        assert KubernetesJob(**MINIMAL | before | {field: changed[field]}).manifests() != plain, field


# -- validated by Kubernetes' own schemas --------------------------------------------------------------------------


@pytest.mark.overlay
@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", "PyTorchJob"])
@pytest.mark.parametrize(
    "given", [MINIMAL, FULL, FULL | {"nnodes": "1", "min_nodes": None}], ids=["least", "most", "one"]
)
def test_kubernetes_schemas_accept_job_and_pod(kind: Any, given: dict[str, Any]) -> None:
    """The Job, and a PyTorchJob's pods, are valid for Kubernetes' schemas, with unknown keys forbidden."""
    import kubernetes_validate

    made = KubernetesJob(**given, kind=kind).manifests()
    if kind == "PyTorchJob":
        spec = made[0]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
        document = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "a", **spec["metadata"]},
            "spec": spec["spec"],
        }
    else:
        document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job_of(made)}
    for version in ("1.31", "1.33", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(document, version, strict=True)
    broken = json.loads(json.dumps(document).replace('"enableServiceLinks"', '"enableServiceLink"'))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.33", strict=True)


# -- pods ----------------------------------------------------------------------------------------------------------

TRAIN = """
import hashlib, os, time, torch, outlast

def allowed():
    try:
        return int(open("limit").read() or 0)
    except FileNotFoundError:
        return 0

with outlast.init("outlast.toml") as run:
    torch.manual_seed(run.global_rank)
    state = {"weight": torch.zeros(4, dtype=torch.float64)}
    for iteration in run.steps(state, total=40):
        while iteration >= allowed():
            run._monitor.heartbeat()
            time.sleep(0.02)
        gradient = torch.full((4,), float(iteration + run.global_rank + 1), dtype=torch.float64)
        torch.distributed.all_reduce(gradient)
        state["weight"] = 0.9 * state["weight"] + gradient
        if run.global_rank == 0:
            print("did", iteration + 1, "on", os.environ["OUTLAST_NODE"], flush=True)
    digest = hashlib.sha256(state["weight"].numpy().tobytes()).hexdigest()
    print("trained", run.iteration, digest, flush=True)
"""


def undisturbed() -> str:
    """Return the output of the script after 40 iterations on two ranks."""
    import hashlib

    import torch

    weight = torch.zeros(4, dtype=torch.float64)
    for iteration in range(40):
        weight = 0.9 * weight + torch.full((4,), float(2 * iteration + 3), dtype=torch.float64)
    return f"trained 40 {hashlib.sha256(weight.numpy().tobytes()).hexdigest()}"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Return the pods of a job with two nodes and a spare; skip if none can be created."""
    if not can_create():
        pytest.skip("no namespaces can be made here")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "outlast.toml").write_text('[checkpoint]\ndirectory = "ckpt"\nsave_interval = 5\n')
    job = KubernetesJob(
        command=("--ft-node-heartbeat-timeout=5", "--no-health-check", "train.py"),
        name="gpt",
        image="train:1",
        run_claim="runs",
        nnodes="2:3",
        nproc_per_node="1",
        mount_path=str(tmp_path / "runs"),
        join_timeout=120,
    )
    with Pods(tmp_path, job.manifests()[0]) as made:
        yield made


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(900)
def test_pods_survive_a_kill_and_an_eviction(pods: Pods, tmp_path: Path) -> None:
    """A killed pod is replaced by the spare, an evicted one ends all pods with 75, and the next pods finish with the
    weights of an undisturbed run."""
    limit = tmp_path / "limit"
    for index in range(3):
        pods.start(index, f"machine-{index}")
    mains = [pods.main(index) for index in range(3)]
    assert all(pod.poll() is None for pod in pods.pods.values()), pods.logs()
    pods.publish()
    limit.write_text("12")
    places = ("(node rank 0 of 2)", "(node rank 1 of 2)", "is a spare")
    first, second, spare = (pods.wait_for_any(place) for place in places)
    assert {first, second, spare} == {0, 1, 2}
    pods.wait_for("did 12 on", first)
    os.kill(mains[second], signal.SIGKILL)
    pods.wait(second)
    limit.write_text("20")
    pods.wait_for("(node rank 1 of 2)", spare)
    pods.wait_for("did 20 on", first)
    pods.start(second, "machine-3")
    pods.publish()
    pods.wait_for("is a spare", second)
    os.kill(mains[spare], signal.SIGTERM)
    pods.wait_for("Received signal 15", spare)
    limit.write_text("30")
    assert pods.wait(0, 1, 2) == {0: 75, 1: 75, 2: 75}, pods.logs()
    limit.write_text("40")
    for index in range(3):
        pods.start(index, f"machine-{index}")
    pods.publish()
    assert pods.wait(0, 1, 2) == {0: 0, 1: 0, 2: 0}, pods.logs()
    text = "".join(pods.log(index).read_text() for index in range(3))
    assert set(re.findall(r"trained \d+ \w+", text)) == {undisturbed()}
    assert text.count("did 40 on") == 1


@pytest.mark.process
def test_wait_for_unknown_host_is_bounded(tmp_path: Path) -> None:
    """resolve_timeout bounds the wait for names; without it an unknown host is rejected at once."""
    (tmp_path / "train.py").write_text("")
    for conf in ([], ["--rdzv-conf=resolve_timeout=0.2"]):
        words = ["run", "--nnodes=2", "--rdzv-endpoint=no-such-host.invalid:29400", *conf, "train.py"]
        done = run_python("-c", MAIN, *words, cwd=tmp_path, code=2)
        assert "no such host: 'no-such-host.invalid'" in done.stderr


def test_documented_manifest_and_code_are_current() -> None:
    """The manifest of the page is the output of its command, and the page's Python works."""
    text = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"\$ outlast k8s manifest (.*?[^\\])\n", text.replace("\\\n", " "))[:1]
    shown = invoke(*shlex.split(command.partition("|")[0]))
    assert shown.exception is None
    assert f"```yaml\n{shown.stdout}```" in text
    for block in python_blocks("kubernetes.md"):
        namespace: dict[str, Any] = {}
        exec(compile(block, "kubernetes.md", "exec"), namespace)
        check_models(namespace["manifests"])


@pytest.mark.cold
@pytest.mark.process
def test_kubernetes_module_imports_no_framework() -> None:
    """Creating manifests needs neither torch nor a Kubernetes client."""
    code = f"import sys, {kubernetes.__name__}; print({{'torch', 'yaml', 'kubernetes', 'numpy'}} & set(sys.modules))"
    assert run_python("-c", code).stdout == "set()\n"
