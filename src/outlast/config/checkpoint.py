"""Settings of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from outlast.config.base import (
    Settings,
    require,
    require_above_zero,
    require_at_least,
    require_finite,
    require_utf8,
    take_known_names,
)

Interval = int | Literal["auto"]
"""Iterations between two saves; 0 = only on request; ``"auto"`` = computed from a save's cost and the failure rate."""


class CheckpointConfig(Settings):
    """Where and how often checkpoints are saved, and how many are kept.

    Two tiers can be configured, one or both: ``directory`` is the global tier, ``local_directory`` the node-local one.
    With an agent (``outlast run``) a third needs no setting: the newest checkpoint stays in the node's memory.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    directory: str | None = None
    """Global tier: a path that every rank can access, or an fsspec URL (``s3://bucket/run``, ``gs://bucket/run``).
    Written in the format of ``torch.distributed.checkpoint``; any number of ranks can load it."""

    local_directory: str | None = None
    """Local tier: a folder on a disk of each node, or in memory (``/dev/shm/...``); each node creates a subfolder with
    its name. With replication, the same on all ranks of a node. Can be loaded only by as many ranks as saved it."""

    save_interval: Interval = 0
    """Iterations between two saves to all tiers; 0 = only when the script requests a save, or at an orderly end;
    ``auto`` = computed from the cost of a save and ``rank_mttf_hours``."""

    non_persistent_save_interval: Interval = 0
    """Iterations between two saves to the node-local tiers only (memory, local disk and replicas); 0 = only with
    ``save_interval``; ``auto`` as for ``save_interval``."""

    rank_mttf_hours: float = 8000.0
    """Mean time to failure of one rank, in hours, for ``auto``; Meta reported 7.9 h for a job of 1,024 GPUs."""

    async_save: bool = True
    """Return from a save as soon as the state is copied; off = return when it is committed."""

    overlap_staging: bool = False
    """Return from a save before parameters and optimizer states are copied; the copy continues during the next forward
    and backward, and the optimizer's ``step()`` waits for it. Use only if nothing else changes them: a change that is
    detected fails the save. If an optimizer's ``step()`` was not observed since the last save, or may be in a CUDA
    graph, its state is copied before the return."""

    replication: bool | None = None
    """Copy each rank's shard to other nodes; ``None`` = if there are several nodes and a local tier or an agent."""

    replication_factor: int = 2
    """Nodes that store each shard, including the node of its rank."""

    replication_jump: int | None = None
    """Distance in ranks between a rank and the rank whose node stores its copy; ``None`` = the number of ranks per
    node."""

    replication_parity: int = 0
    """Instead of copies: number of nodes whose shards share one XOR parity, which survives the loss of any one of them;
    0 = copies."""

    replication_timeout: float = 10.0
    """Seconds without progress after which replication to a partner node is abandoned; the save then counts without
    that copy."""

    replication_key_file: str | None = None
    """File with the secret by which nodes authenticate each other; ``None`` = derived from the run key, or randomly
    generated if there is none."""

    most_recent_k: int = 3
    """Number of newest committed checkpoints to keep in the global tier, at least 2 (the newest may be invalid); -1 =
    all."""

    local_most_recent_k: int = 2
    """The same for the local tier."""

    save_retain_interval: int = 0
    """Checkpoints whose iteration is a multiple of this number are kept permanently in the global tier; 0 = none."""

    suspect_window: int = 20
    """Iterations after a load in which an invalid result makes the loaded checkpoint suspect; one checkpoint older than
    this window is always kept."""

    prefer_finite: bool = True
    """Load an older checkpoint instead of one with infinite or NaN values; the log lists a newer one that is skipped.
    Off = always load the newest, for states that can contain such values in normal operation."""

    missing: str = "error"
    """``keep``: values that the state has and the checkpoint lacks (an average of the weights, a new layer, its
    parameters in the optimizer) keep their present value at a load, and one log line lists them. ``error``: the load
    fails."""

    max_consecutive_save_failures: int = 0
    """Consecutive saves that reached no tier after which training stops with the last error; 0 = never:
    ``max_durable_lag`` is the limit."""

    save_timeout: float = 600.0
    """Seconds that an attempt to commit a save to a tier may take before it counts as failed; a save to the local or
    global tier is then retried until a newer save replaces it."""

    max_durable_lag: float = 7200.0
    """Seconds for which a commit that survives the end of the job may be overdue before all ranks exit with 93; 0 = no
    limit. The commit goes to ``directory``, or without one to the local directory; commits to other tiers do not count.
    The time starts with the oldest save that the commit would cover, and continues over restarts within the job. A
    final save may take the remaining time."""

    restore_timeout: float = 900.0
    """Seconds that a start waits for a checkpoint directory or an object store that does not respond, if the node-local
    tiers have no checkpoint that this job has saved; 0 = do not wait."""

    response_timeout: float = 60.0
    """Seconds without progress after which a call on a checkpoint directory or object store counts as failed while a
    job starts or loads. It must be above 0: a call on a mount that hangs would never return."""

    save: str | None = None
    """Megatron's name for ``directory``."""

    load: str | None = None
    """Global tier to load from if ``directory`` has no checkpoint yet, for example of another run; read only."""

    resume_from_other_run: bool = False
    """Continue from checkpoints that another run saved in these directories; off = the run is refused there. Two runs
    differ if both were given names (``--rdzv-id``, ``--run-dir``) and have none in common, or, if one of them has no
    name, if they run different scripts."""

    non_persistent_local_ckpt_dir: str | None = None
    """Megatron's name for ``local_directory``."""

    non_persistent_local_ckpt_algo: str = "atomic"
    """``atomic`` or Megatron's ``fully_parallel``; both mean that the local file of a rank stores the complete state of
    that rank. In Megatron, ``fully_parallel`` distributes a rank's state over other ranks, so that the loss of one node
    also loses state of others."""

    non_persistent_ckpt_type: str | None = None
    """Megatron's choice of the tiers of non-persistent saves: ``local`` = memory, replicas and ``local_directory``,
    which must be set; ``in_memory`` = memory and replicas, without a ``local_directory``; none = as set by the other
    settings. ``global`` is refused: use ``save_interval`` and ``save_retain_interval``."""

    ckpt_format: str = "torch_dist"
    """Megatron's name for the format of ``torch.distributed.checkpoint``, in which the global tier is written; others
    are refused."""

    @classmethod
    def _settle(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return take_known_names(values, "checkpoint")

    def _check(self) -> None:
        require_finite(self)
        for name in ("directory", "local_directory", "load", "replication_key_file"):
            value = getattr(self, name)
            require(value is None or bool(value), f"{name} must not be empty; leave it out, or name a folder")
            require_utf8(name, value)
        require(
            self.directory is not None or self.local_directory is not None,
            "neither directory nor local_directory is set; name a folder for the run's checkpoints",
        )
        require(
            self.local_directory is None or "://" not in self.local_directory,
            f"local_directory={self.local_directory!r} must be a folder of the node; URLs belong into directory",
        )
        require(
            self.local_directory is None or self.local_directory != self.directory,
            f"local_directory and directory are both {self.directory!r}; give each tier a different folder",
        )
        for name in ("save_interval", "non_persistent_save_interval"):
            value = getattr(self, name)
            require(
                value == "auto" or (isinstance(value, int) and value >= 0),
                f"{name}={value!r} must be a number of iterations, 0, or 'auto'",
            )
        for name in ("most_recent_k", "local_most_recent_k"):
            value = getattr(self, name)
            require(value == -1 or value >= 2, f"{name}={value} must be at least 2, or -1 to keep all")
        require_at_least(
            self, 0, "save_retain_interval", "suspect_window", "max_consecutive_save_failures", "max_durable_lag"
        )
        require_at_least(self, 0, "restore_timeout", what=" seconds")
        require_above_zero(self, "save_timeout", "replication_timeout", "response_timeout")
        require_above_zero(self, "rank_mttf_hours", what="")
        check_missing(self.missing)
        self._check_replication()
        self._check_megatrons_choices()

    def _check_megatrons_choices(self) -> None:
        algo, kind = self.non_persistent_local_ckpt_algo, self.non_persistent_ckpt_type
        require(
            algo in ("atomic", "fully_parallel"),
            f"non_persistent_local_ckpt_algo={algo!r} must be atomic or fully_parallel; both mean that each rank's "
            "local file holds all of its state",
        )
        require(
            kind != "global",
            "non_persistent_ckpt_type='global' is not supported: non-persistent checkpoints stay on their ranks' "
            "nodes; to save more often to the global tier, write "
            f"save_interval={self.non_persistent_save_interval}, and save_retain_interval={self.save_interval} for "
            "those to keep",
        )
        require(
            kind in (None, "local", "in_memory"),
            f"non_persistent_ckpt_type={kind!r} must be local or in_memory; leave it out to use all node-local tiers",
        )
        require(
            kind != "local" or self.local_directory is not None,
            "non_persistent_ckpt_type='local' needs local_directory (non_persistent_local_ckpt_dir); name a folder",
        )
        require(
            kind != "in_memory" or self.local_directory is None,
            f"non_persistent_ckpt_type='in_memory' contradicts local_directory={self.local_directory!r}; leave one out",
        )
        require(
            self.ckpt_format == "torch_dist",
            f"ckpt_format={self.ckpt_format!r} is not supported: checkpoints are written in the format of torch."
            "distributed.checkpoint, during training and for any number of ranks; leave it out, or write torch_dist",
        )

    def _check_replication(self) -> None:
        require_at_least(self, 2, "replication_factor", what="; for no copies set replication=false")
        require_at_least(self, 1, "replication_jump", what=" rank")
        require(
            self.replication_parity == 0 or self.replication_parity >= 2,
            f"replication_parity={self.replication_parity} must be 0 (copies) or at least 2 nodes",
        )
        require(
            self.replication_parity == 0 or self.replication_factor == 2,
            f"replication_factor={self.replication_factor} is for copies, and replication_parity="
            f"{self.replication_parity} for parity; leave one of them out",
        )
        require(
            self.replication is not False or self.replication_parity == 0,
            f"replication=false contradicts replication_parity={self.replication_parity}; leave one of them out",
        )


def check_missing(value: object) -> object:
    """Return ``value`` if it is ``keep`` or ``error``. Raises: ConfigError."""
    require(value in ("keep", "error"), f"missing={value!r} must be 'error' or 'keep'")
    return value
