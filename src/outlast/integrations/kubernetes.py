"""Kubernetes manifests for a job: a JobSet, Kubeflow's TrainJob, or the older PyTorchJob.

Each pod runs one agent as its main process, so it receives SIGTERM without a shell or a preStop hook in between. The
Job's pod failure policy maps exit codes, since a JobSet only knows failure reasons: 75 is ignored per pod and not
counted, while 2, 17 and 93 fail the whole job.

Rejected: an init container that waits for names, since ``outlast run`` can wait; a readiness probe, since peers must
reach a pod before the job runs; the run key in an environment variable, which a description of the pod shows; a restart
policy of the pod, which keeps the pod on a lost node; default CPUs and memory, since no amount fits all machines
(:attr:`KubernetesJob.warnings` reports missing ones).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from outlast.config.base import require
from outlast.errors import ConfigError, ExitReason
from outlast.integrations.run_command import check_run_command, is_nproc, split_command
from outlast.launch.run_parser import given_options

__all__ = ["KubernetesJob", "as_yaml"]

Kind = Literal["JobSet", "TrainJob", "PyTorchJob"]
GRACE_MARGIN_S = 30
"""Grace period of a pod beyond ``shutdown_grace`` until Kubernetes sends SIGKILL."""
RESOLVE_TIMEOUT_S = 600
"""How long an agent waits for the names of the first pods."""
KEY_FOLDER = "/etc/outlast-run-key"
_NEEDS_A_PERSON = sorted(
    int(one) for one in (ExitReason.BAD_INPUT, ExitReason.FAILED_VALIDATION, ExitReason.NO_PROGRESS)
)
_REQUESTED = sorted([int(ExitReason.PREEMPTED), 128 + 2, 128 + 15])
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_QUALIFIED = re.compile(rf"({_SUBDOMAIN.pattern}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"(\d+(\.\d+)?)(m|k|[MGTPE]|[KMGTPE]i)?")
_CAPABILITY = re.compile(r"(?!CAP_)[A-Z][A-Z0-9_]*")
_MAX_ID = (1 << 31) - 1
_FACTORS = {"m": 1e-3, "": 1.0} | {
    unit: base ** (power + 1)
    for base, units in ((1000.0, ("k", "M", "G", "T", "P", "E")), (1024.0, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")))
    for power, unit in enumerate(units)
}
_PLAIN = re.compile(r"(--|/)?[A-Za-z]([A-Za-z0-9._/=,:-]*[A-Za-z0-9])?")
_WORDS = frozenset(["y", "yes", "n", "no", "on", "off", "true", "false", "null"])
"""Words that some version of YAML does not read as a string, in any case."""
_POD_NAME_END = len("-abcde")
_TRANSLATE = """p= signaled= c=127
trap 'signaled=1; kill -TERM "$p" 2>/dev/null' TERM INT
"$@" & p=$!
[ -z "$signaled" ] || kill -TERM "$p" 2>/dev/null
while signaled=; wait "$p"; s=$?; [ "$s" = 127 ] || c=$s; [ -n "$signaled" ]; do :; done
case $c in 1|16|18|19|75) c=$((c + 128));; esac
exit "$c"
"""
"""For PyTorchJob, for which codes below 128 are final: 128 is added to the codes after which a job is restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """A job of a run on Kubernetes.

    Raises:
        ConfigError: A value is out of range, not a valid name for Kubernetes, or contradicts another; the message names
            it.
    """

    command: tuple[str, ...]
    """Arguments after ``outlast run`` and its generated options: more options, the training script, its arguments.
    Neither a shell nor Kubernetes expands them."""
    name: str
    """Names the job and, with ``run_id``, the run: a DNS label that begins with a letter."""
    image: str
    """The container's image, which contains outlast and the training script."""
    run_claim: str
    """The PersistentVolumeClaim of the run directory, which outlives the pods; all pods write to it
    (``ReadWriteMany``)."""
    kind: Kind = "JobSet"
    """``JobSet``, ``TrainJob`` or ``PyTorchJob``."""
    nnodes: str = "1"
    """Nodes that train (``4``), or those and spares (``4:5``: 4 train, 1 waits)."""
    nproc_per_node: str = "auto"
    """Workers on a node: a number, ``auto``, ``gpu``, ``xpu`` or ``cpu``."""
    namespace: str | None = None
    """``None`` = the namespace of the user who applies the manifest."""
    run_id: str | None = None
    """Names the run in each of its jobs; ``None`` = the job's name."""
    mount_path: str = "/runs"
    """Mount path of the volume of ``run_claim``; the run directory is a folder in it with the run's name."""
    run_key_secret: str | None = None
    """The Secret that holds the run key as ``run.key``; ``None`` = the first agent creates a key in the run directory.
    """
    gpus_per_node: int | None = None
    """GPUs of a pod; ``None`` = none is requested."""
    gpu_resource: str = "nvidia.com/gpu"
    """The cluster's name of the GPU resource."""
    cpus: str | None = None
    """CPUs of a pod, as a quantity (``32``, ``500m``); ``None`` = not requested."""
    memory: str | None = None
    """Memory of a pod, as a quantity (``512Gi``), including ``/dev/shm`` and the memory tier."""
    resources: tuple[str, ...] = ()
    """More resources of a pod, such as ``rdma/ib=1``."""
    shm_size: str | None = None
    """Limit of ``/dev/shm``, which is part of the pod's memory; ``None`` = the pod's memory."""
    port: int = 29400
    """Port of the agents' rendezvous."""
    num_endpoints: int = 3
    """Number of the first pods that may host the coordinator."""
    min_nodes: int | None = None
    """Fewest nodes with which the job continues after a node is lost without a spare (``--ft-min-nodes``); ``None`` =
    it does not shrink."""
    shutdown_grace: float = 60.0
    """Seconds that workers get to save after a shutdown request (``--ft-shutdown-grace``), rounded up; the pod has 30
    more."""
    join_timeout: int = 3600
    """Seconds for which agents wait for each other: pods may be pending for long."""
    num_job_retries_on_failure: int = 2
    """How often the whole job is recreated after a failure, in total (JobSet and TrainJob). 75 is not counted."""
    pod_retries: int | None = None
    """Pods that may fail individually before that counts as a failure of the job; ``None`` = the number of spares."""
    share_nodes: bool = False
    """Several pods of the job may run on one machine."""
    topology: str | None = None
    """Label of machines, such as ``topology.kubernetes.io/zone``: all pods run where it has the same value."""
    node_selector: tuple[str, ...] = ()
    """Labels that machines must have, as ``key=value``."""
    tolerations: tuple[str, ...] = ()
    """Taints of machines to tolerate, as ``key`` or ``key=value``."""
    volumes: tuple[str, ...] = ()
    """More volumes, as ``claim:NAME:/path``, ``configmap:NAME:/path`` or ``secret:NAME:/path``; the last two are
    read-only."""
    env: tuple[str, ...] = ()
    """More environment variables, as ``NAME=VALUE``; for secrets use a volume."""
    service_account: str | None = None
    priority_class: str | None = None
    queue: str | None = None
    """Kueue's local queue."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with the credentials of the image's registry."""
    metrics_port: int | None = None
    """Port on which each pod exports metrics for Prometheus (``--metrics-port``, on all of the pod's addresses), with
    annotations for scrapers; ``None`` = none."""
    run_as_user: int | None = None
    """User id of the container's processes; ``None`` = the image's."""
    run_as_group: int | None = None
    """Group id of the container's processes; ``None`` = the image's."""
    run_as_non_root: bool = False
    """Kubernetes refuses to start the container as root."""
    fs_group: int | None = None
    """Group id of volumes, if their kind supports that, and an additional group of the container's processes."""
    capabilities: tuple[str, ...] = ()
    """Linux capabilities of the container, such as ``IPC_LOCK`` for RDMA; all others are dropped."""
    allow_privilege_escalation: bool = False
    """A process may gain more privileges than its parent, for example with setuid programs."""
    seccomp_profile: str | None = None
    """``RuntimeDefault`` or ``Unconfined``; ``None`` = the cluster's default."""
    working_dir: str | None = None
    """Folder in which the script starts; ``None`` = the image's."""
    outlast: str = "outlast"
    """The ``outlast`` command in the image, such as ``uv run outlast``; split as a shell would, but nothing in it is
    expanded."""

    def __post_init__(self) -> None:
        require(bool(self.command), "there is no training script; name one, for example: -- train.py --lr 3e-4")
        _ = self.num_nodes
        for names, good, what in _FORMS:
            for name in names.split():
                value = getattr(self, name)
                for one in value if isinstance(value, tuple) else () if value is None else (value,):
                    require(good(one), f"{name}={one!r} is not {what}")
        for names, least, most in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                require(value is None or least <= value <= most, f"{name}={value} must be from {least} to {most}")
        self._check_name()
        self._normalise_paths()
        self._check_lists()
        self._check_security()
        fewest, shm, memory = self.min_nodes, self.shm_size, self.memory
        require(
            fewest is None or fewest <= self.num_nodes,
            f"min_nodes={fewest} must be from 1 to the {self.num_nodes} of nnodes={self.nnodes}",
        )
        require(
            shm is None or memory is None or _amount(shm) <= _amount(memory),
            f"shm_size={shm} is more than memory={memory}, in which it is counted; raise memory",
        )
        require(self.metrics_port != self.port, f"metrics_port={self.port} is the port of the agents; take another one")
        require(
            self.kind != "PyTorchJob" or self.pod_retries is None,
            "pod_retries: a PyTorchJob has no such limit; leave it out",
        )
        for word in (*self.command, *self.env, self.image):
            require("\0" not in word, f"{word!r} has a character that no command line takes")
        _ = self._outlast_words
        given = check_run_command(self.command, _OURS)
        require(
            "metrics_address" not in given or self.metrics_port is not None,
            f"{given.get('metrics_address')} has no effect without metrics_port; set that, or leave it out",
        )

    def _check_name(self) -> None:
        last = self._num_pods - 1
        longest = f"{self.name}-worker-{last}" if self.kind == "PyTorchJob" else self._pod(last)
        too_long = len(longest) + _POD_NAME_END - 63
        require(
            too_long <= 0,
            f"name={self.name!r} is too long: the name of a pod made from it has {too_long} characters too many",
        )

    def _normalise_paths(self) -> None:
        """Write paths as Kubernetes compares them, and check that each is used once."""
        for name in ("mount_path", "working_dir"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, _normal(path))
        taken = {"/", "/dev/shm", KEY_FOLDER}
        require(
            self.mount_path not in taken,
            f"mount_path={self.mount_path!r} is taken in the container; name another folder, such as /runs",
        )
        taken.add(self.mount_path)
        volumes = [one.split(":", 2) for one in self.volumes]
        for one in volumes:
            one[2] = _normal(one[2])
            require(one[2] not in taken, f"volumes: {one[2]} has a volume already; name another path")
            taken.add(one[2])
        object.__setattr__(self, "volumes", tuple(":".join(one) for one in volumes))

    def _check_lists(self) -> None:
        own = {"cpu": "cpus", "memory": "memory", self.gpu_resource: "gpus_per_node"}
        given = {key: f"{name}={value}" for key, name in own.items() if (value := getattr(self, name)) is not None}
        for one in self.resources:
            key = one.partition("=")[0]
            require(key not in given, f"resources: {one!r} conflicts with {given.get(key)}; remove one of them")
            given[key] = one
        for field in ("node_selector", "env"):
            names = [one.partition("=")[0] for one in getattr(self, field)]
            for name in names:
                require(names.count(name) == 1, f"{field}: {name} is there twice; leave one out")
                is_own = field == "env" and name in ("NODE_NAME", "OUTLAST_RUN_KEY")
                require(not is_own, f"env: {name} is not set here; for a run key take run_key_secret")

    def _check_security(self) -> None:
        require(
            not self.run_as_non_root or self.run_as_user != 0,
            "run_as_user=0 is root, and contradicts run_as_non_root; leave one of them out",
        )
        is_other_user = self.run_as_non_root or self.run_as_user not in (None, 0)
        require(
            self.run_key_secret is None or not is_other_user or self.fs_group is not None or self.run_as_group == 0,
            f"run_key_secret={self.run_key_secret} can be read by root and by fs_group only, which is not set; set "
            "fs_group to a group id",
        )
        require(
            "SYS_ADMIN" not in self.capabilities or self.allow_privilege_escalation,
            "capabilities: Kubernetes grants 'SYS_ADMIN' only with allow_privilege_escalation",
        )

    # -- what is derived -------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes that train."""
        return self._bounds[0]

    @property
    def num_spares(self) -> int:
        """Nodes that wait for the slot of a lost one."""
        return self._bounds[1] - self._bounds[0]

    @property
    def _num_pods(self) -> int:
        return self._bounds[1]

    @property
    def _bounds(self) -> tuple[int, int]:
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", self.nnodes)
        low, high = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, 0)
        require(
            0 < low <= high, f"nnodes={self.nnodes!r} is not N or MIN:MAX with 0 < MIN <= MAX; write for example 4:5"
        )
        return low, high

    @property
    def _outlast_words(self) -> list[str]:
        return split_command(self.outlast)

    def _pod(self, index: int) -> str:
        """Return the host name of a pod."""
        if self.kind == "PyTorchJob":
            return f"{self.name}-master-0" if index == 0 else f"{self.name}-worker-{index - 1}"
        return f"{self.name}-node-0-{index}"

    @property
    def endpoint(self) -> str:
        """Rendezvous endpoint of the agents: the first of these pods that is alive."""
        domain = "" if self.kind == "PyTorchJob" else f".{self.name}"
        hosts = (f"{self._pod(index)}{domain}:{self.port}" for index in range(min(self.num_endpoints, self._num_pods)))
        return ",".join(hosts)

    @property
    def run_arguments(self) -> list[str]:
        """Arguments of ``outlast`` in a pod; Kubernetes replaces ``$(NODE_NAME)`` and ``$(JOB_COMPLETION_INDEX)``."""
        run_id = self.run_id or self.name
        words = ["run", f"--nnodes={self.nnodes}", f"--nproc-per-node={self.nproc_per_node}"]
        if self._num_pods > 1:
            words += [
                f"--rdzv-endpoint={self.endpoint}",
                f"--rdzv-conf=join_timeout={self.join_timeout},resolve_timeout={RESOLVE_TIMEOUT_S}",
            ]
            if self.kind != "PyTorchJob":
                words.append("--node-rank=$(JOB_COMPLETION_INDEX)")
        if not self.share_nodes:
            words.append("--node-name=$(NODE_NAME)")
        words.append(f"--ft-shutdown-grace={math.ceil(self.shutdown_grace)}")
        if self.min_nodes is not None:
            words.append(f"--ft-min-nodes={self.min_nodes}")
        words += [f"--rdzv-id={run_id}", f"--run-dir={PurePosixPath(self.mount_path) / run_id}"]
        if self.run_key_secret is not None:
            words.append(f"--run-key-file={KEY_FOLDER}/run.key")
        if self.metrics_port is not None:
            words.append(f"--metrics-port={self.metrics_port}")
            if "metrics_address" not in given_options(self.command):
                words.append("--metrics-address=0.0.0.0")
        return [*words, *(_escaped(word) for word in self.command)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Possible problems in the cluster although Kubernetes accepts the manifest; one line each."""
        keys = {one.partition("=")[0] for one in self.resources}
        found = []
        if self.cpus is None and "cpu" not in keys:
            found.append(
                "cpus: the pods request none, so that Kubernetes may place them on machines that have none left"
            )
        if self.memory is None and "memory" not in keys:
            found.append(
                "memory: the pods request none, and neither they nor /dev/shm have a limit: Kubernetes evicts them "
                "first where a machine runs out"
            )
        return tuple(found)

    # -- manifests -------------------------------------------------------------------------------------------------

    def manifests(self) -> list[dict[str, Any]]:
        """Return the objects to apply, in their order."""
        if self.kind == "JobSet":
            return [
                self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self.name, self._job_set(self._container("node")))
            ]
        if self.kind == "PyTorchJob":
            return [self._object("kubeflow.org/v1", "PyTorchJob", self.name, self._pytorch_job())]
        container = self._container("node")
        trainer = {name: container[name] for name in ("image", "command", "args")}
        runtime = {
            "mlPolicy": {"numNodes": self._num_pods},
            "template": {"spec": self._job_set(container)},
        }
        reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": f"{self.name}-runtime"}
        job = {"runtimeRef": reference, "trainer": {**trainer, "numNodes": self._num_pods}}
        return [
            self._object("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", f"{self.name}-runtime", runtime),
            self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", self.name, job),
        ]

    def _object(self, api: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name, "labels": self._labels}
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        if self.queue is not None and kind != "TrainingRuntime":
            metadata["labels"] = {**self._labels, "kueue.x-k8s.io/queue-name": self.queue}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}

    @property
    def _labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/instance": self.name}

    def _job_set(self, container: dict[str, Any]) -> dict[str, Any]:
        job: dict[str, Any] = {"spec": self._job(container)}
        if self.kind == "TrainJob":
            job["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
        person = {"name": "needsAPerson", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["node"]},
            "failurePolicy": {"maxRestarts": self.num_job_retries_on_failure, "rules": [person]},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": job}],
        }

    def _job(self, container: dict[str, Any]) -> dict[str, Any]:
        def on_exit(action: str, codes: list[int]) -> dict[str, Any]:
            return {"action": action, "onExitCodes": {"containerName": "node", "operator": "In", "values": codes}}

        evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        return {
            "completionMode": "Indexed",
            "completions": self._num_pods,
            "parallelism": self._num_pods,
            "backoffLimit": self.num_spares if self.pod_retries is None else self.pod_retries,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [on_exit("FailJob", _NEEDS_A_PERSON), on_exit("Ignore", _REQUESTED), evicted],
            },
            # A missing spare, or an empty slot, must not block completion.
            "successPolicy": {"rules": [{"succeededCount": self.min_nodes or self.num_nodes}]},
            "template": self._pod_template(container),
        }

    def _pytorch_job(self) -> dict[str, Any]:
        container = self._container("pytorch")
        # The operator recreates a pod whose exit code is above 127; other codes are final.
        container["args"] = ["-c", _TRANSLATE.replace("$(", "$$("), "sh", *container["command"], *container["args"]]
        container["command"] = ["/bin/sh"]
        replica = {"restartPolicy": "ExitCode", "template": self._pod_template(container, restart_policy=None)}
        replicas: dict[str, Any] = {"Master": {"replicas": 1, **replica}}
        if self._num_pods > 1:
            replicas["Worker"] = {"replicas": self._num_pods - 1, **replica}
        return {"runPolicy": {"cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": replicas}

    def _pod_template(self, container: dict[str, Any], *, restart_policy: str | None = "Never") -> dict[str, Any]:
        spec: dict[str, Any] = {} if restart_policy is None else {"restartPolicy": restart_policy}
        spec |= {
            "terminationGracePeriodSeconds": math.ceil(self.shutdown_grace) + GRACE_MARGIN_S,
            "enableServiceLinks": False,
            "containers": [container],
            "volumes": self._volumes(),
        }
        spec |= _present(
            affinity=self._affinity(),
            nodeSelector=dict(one.split("=", 1) for one in self.node_selector),
            tolerations=[_toleration(one) for one in self.tolerations],
            serviceAccountName=self.service_account,
            priorityClassName=self.priority_class,
            imagePullSecrets=[{"name": one} for one in self.image_pull_secrets],
            securityContext=self._pod_security(),
        )
        metadata: dict[str, Any] = {"labels": self._labels}
        if self.metrics_port is not None:
            values = {"scrape": "true", "port": str(self.metrics_port), "path": "/metrics"}
            metadata["annotations"] = {f"prometheus.io/{name}": value for name, value in values.items()}
        return {"metadata": metadata, "spec": spec}

    def _pod_security(self) -> dict[str, Any]:
        security = _present(
            runAsNonRoot=self.run_as_non_root,
            # The default changes the group of every file at each start of a pod.
            fsGroupChangePolicy=None if self.fs_group is None else "OnRootMismatch",
            seccompProfile=None if self.seccomp_profile is None else {"type": self.seccomp_profile},
        )
        ids = {"runAsUser": self.run_as_user, "runAsGroup": self.run_as_group, "fsGroup": self.fs_group}
        return security | {name: value for name, value in ids.items() if value is not None}

    def _affinity(self) -> dict[str, Any] | None:
        def on_same(key: str) -> dict[str, Any]:
            term = {"topologyKey": key, "labelSelector": {"matchLabels": self._labels}}
            return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}

        if self._num_pods == 1:
            return None
        return _present(
            podAntiAffinity=None if self.share_nodes else on_same("kubernetes.io/hostname"),
            podAffinity=None if self.topology is None else on_same(self.topology),
        )

    def _container(self, name: str) -> dict[str, Any]:
        node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        given = [dict(zip(("name", "value"), one.split("=", 1), strict=True)) for one in self.env]
        mounts: list[dict[str, Any]] = [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "run", "mountPath": self.mount_path},
        ]
        if self.run_key_secret is not None:
            mounts.append({"name": "run-key", "mountPath": KEY_FOLDER, "readOnly": True})
        for number, one in enumerate(self.volumes):
            kind, _, path = one.split(":", 2)
            mount: dict[str, Any] = {"name": f"volume-{number}", "mountPath": path}
            mounts.append(mount if kind == "claim" else {**mount, "readOnly": True})
        container: dict[str, Any] = {
            "name": name,
            "image": self.image,
            "command": [_escaped(word) for word in self._outlast_words],
            "args": self.run_arguments,
            "env": [node, *({**one, "value": _escaped(one["value"])} for one in given)],
            "volumeMounts": mounts,
        }
        capabilities = {"drop": ["ALL"], **_present(add=list(self.capabilities))}
        escalates = self.allow_privilege_escalation
        container["securityContext"] = {"allowPrivilegeEscalation": escalates, "capabilities": capabilities}
        ports = {"pytorchjob-port": self.port if name == "pytorch" else None, "metrics": self.metrics_port}
        shown = [{"name": port, "containerPort": number, "protocol": "TCP"} for port, number in ports.items() if number]
        gpus = None if self.gpus_per_node is None else str(self.gpus_per_node)
        asked = _present(**{"cpu": self.cpus, "memory": self.memory, self.gpu_resource: gpus})
        asked |= dict(one.split("=", 1) for one in self.resources)
        resources = {"limits": asked, "requests": dict(asked)} if asked else None
        return container | _present(ports=shown, workingDir=self.working_dir, resources=resources)

    def _volumes(self) -> list[dict[str, Any]]:
        shm = {"medium": "Memory", **_present(sizeLimit=self.shm_size)}
        volumes: list[dict[str, Any]] = [
            {"name": "shm", "emptyDir": shm},
            {"name": "run", "persistentVolumeClaim": {"claimName": self.run_claim}},
        ]
        if self.run_key_secret is not None:
            secret = {"secretName": self.run_key_secret, "items": [{"key": "run.key", "path": "run.key"}]}
            volumes.append({"name": "run-key", "secret": {**secret, "defaultMode": 0o440}})
        for number, one in enumerate(self.volumes):
            kind, name, _ = one.split(":", 2)
            sources: dict[str, dict[str, Any]] = {
                "claim": {"persistentVolumeClaim": {"claimName": name}},
                "configmap": {"configMap": {"name": name}},
                "secret": {"secret": {"secretName": name, "defaultMode": 0o440}},
            }
            volumes.append({"name": f"volume-{number}", **sources[kind]})
        return volumes


def as_yaml(manifests: list[dict[str, Any]]) -> str:
    """Return manifests as YAML documents.

    A string is written without quotes only if no parser can read it as another type: PyYAML follows YAML 1.1 and
    kubectl's parser a mixture, for which ``3e-4`` is a number.

    Raises:
        ConfigError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "YAML needs PyYAML, which is not installed: pip install 'outlast[k8s]', or take --json, as kubectl does"
        ) from None

    class YamlWithoutAnchors(yaml.SafeDumper):
        """Writes no anchors, indents the items of lists, and quotes."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def represent_text(self, data: str) -> yaml.ScalarNode:
            is_plain = _PLAIN.fullmatch(data) is not None and data.lower() not in _WORDS
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_plain else '"')

    YamlWithoutAnchors.add_representer(str, YamlWithoutAnchors.represent_text)
    return yaml.dump_all(manifests, Dumper=YamlWithoutAnchors, sort_keys=False, width=1 << 16, allow_unicode=True)


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value}


def _escaped(word: str) -> str:
    """Escape a word, so that Kubernetes expands nothing in it."""
    return word.replace("$(", "$$(")


def _toleration(one: str) -> dict[str, str]:
    key, equals, value = one.partition("=")
    return {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}


def _normal(path: str) -> str:
    """Return a path without ``//``, ``/.`` and a trailing ``/``."""
    return "/" + str(PurePosixPath(path)).lstrip("/")


def _amount(quantity: str) -> float:
    found = _QUANTITY.fullmatch(quantity)
    assert found is not None
    return float(found[1]) * _FACTORS[found[3] or ""]


def _fits(pattern: re.Pattern[str], most: int = 1 << 16) -> Callable[[str], bool]:
    return lambda text: pattern.fullmatch(text) is not None and len(text) <= most


_is_subdomain = _fits(_SUBDOMAIN, 253)


def _is_qualified(key: str) -> bool:
    return _QUALIFIED.fullmatch(key) is not None and len(key.rpartition("/")[0]) <= 253


def _is_term(one: str) -> bool:
    key, _, value = one.partition("=")
    return _is_qualified(key) and _VALUE.fullmatch(value) is not None


def _is_path(path: str) -> bool:
    return path.startswith("/") and ":" not in path and ".." not in PurePosixPath(path).parts


def _is_volume(one: str) -> bool:
    kind, _, rest = one.partition(":")
    name, _, path = rest.partition(":")
    return kind in ("claim", "configmap", "secret") and _is_subdomain(name) and _is_path(path) and _normal(path) != "/"


_FORMS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("kind", ("JobSet", "TrainJob", "PyTorchJob").__contains__, "JobSet, TrainJob or PyTorchJob"),
    ("name", _fits(re.compile("[a-z].*")), "a valid name for Kubernetes: it must begin with a small letter"),
    ("name namespace queue", _fits(_LABEL, 63), "a valid name for Kubernetes; take small letters, digits and '-'"),
    (
        "run_claim run_key_secret service_account priority_class image_pull_secrets",
        _is_subdomain,
        "a valid name for Kubernetes; take small letters, digits, '-' and '.'",
    ),
    ("image", _fits(re.compile(r"[^ ]*[^\s][^ ]*")), "an image; write for example registry/train:1"),
    ("nproc_per_node", is_nproc, "a number of workers, auto, gpu, xpu or cpu"),
    ("mount_path working_dir", _is_path, "an absolute path without ':' and '..'"),
    ("volumes", _is_volume, "in the form claim:NAME:/path, configmap:NAME:/path or secret:NAME:/path"),
    ("topology gpu_resource", _is_qualified, "a label's key; write for example example.com/name"),
    (
        "run_id",
        _fits(re.compile(r"(?!(none|\.{1,2})$)[A-Za-z0-9_.-]+")),
        "a run id; take letters, digits, '.', '_' and '-', and not 'none'",
    ),
    ("cpus memory shm_size", _fits(_QUANTITY), "a quantity; write for example 8, 500m, 64Gi"),
    (
        "resources",
        lambda one: _is_qualified(one.partition("=")[0]) and _fits(_QUANTITY)(one.partition("=")[2]),
        "in the form key=quantity, such as rdma/ib=1",
    ),
    ("node_selector", lambda one: "=" in one and _is_term(one), "in the form key=value of a label"),
    ("tolerations", _is_term, "in the form key or key=value"),
    ("env", _fits(re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)), "in the form NAME=VALUE"),
    ("capabilities", _fits(_CAPABILITY), "a capability without CAP_; write for example IPC_LOCK"),
    ("seccomp_profile", ("RuntimeDefault", "Unconfined").__contains__, "RuntimeDefault or Unconfined"),
)
"""Fields, the check of each of their values, and its description."""
_RANGES = (
    ("port metrics_port", 1, 65535),
    ("num_endpoints min_nodes join_timeout gpus_per_node", 1, _MAX_ID),
    ("shutdown_grace num_job_retries_on_failure pod_retries run_as_user run_as_group fs_group", 0, _MAX_ID),
)
"""Fields, and their least and greatest value."""
_OURS = {
    "nnodes": "nnodes",
    "nproc_per_node": "nproc_per_node",
    "rdzv_id": "run_id",
    "run_dir": "mount_path and run_id",
    "run_key_file": "run_key_secret",
    "rdzv_endpoint": "the pods' names",
    "rdzv_conf": "join_timeout",
    "master_addr": "the pods' names",
    "master_port": "port",
    "node_name": "the machine's name",
    "node_rank": "the pod's number",
    "ft_shutdown_grace": "shutdown_grace",
    "ft_min_nodes": "min_nodes",
    "metrics_port": "the manifest's metrics_port",
}
"""Options of ``outlast run`` that the manifest sets, and their sources."""
