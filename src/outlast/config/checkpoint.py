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
"""Iterations between two saves; 0 = never by itself; ``"auto"`` = from a save's cost and the failure rate."""


class CheckpointConfig(Settings):
    """Where and how often generations are saved, and how many are kept.

    Two places, either or both: ``directory`` is the global tier, ``local_directory`` the node's own. With an agent
    (``outlast run``) a third needs no setting: the newest generation stays in the node's memory.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    directory: str | None = None
    """Global tier: a path that every rank sees, or an fsspec URL (``s3://bucket/run``, ``gs://bucket/run``).
    Written in the format of ``torch.distributed.checkpoint``; any number of ranks can load it."""

    local_directory: str | None = None
    """Local tier: a folder on a disk of each node, or in memory (``/dev/shm/...``); each node makes one of its name in
    it. Loaded by as many ranks as saved it."""

    save_interval: Interval = 0
    """Iterations between two saves to all tiers; 0 = only when the script, or an orderly end, asks for one; ``auto`` =
    from what a save costs and ``rank_mttf_hours``."""

    non_persistent_save_interval: Interval = 0
    """Iterations between two saves to memory, local tier and replicas alone; 0 = only with ``save_interval``; ``auto``
    as there."""

    rank_mttf_hours: float = 8000.0
    """Mean time to a failure of one rank, in hours, for ``auto``; Meta saw 7.9 h on 1,024 GPUs."""

    async_save: bool = True
    """Return from a save once the state is copied; off: once it is committed."""

    overlap_staging: bool = False
    """Return from a save before parameters and optimizer states are copied; the copy continues during the next forward
    and backward, and the optimizer's ``step()`` waits for it. Only for training that changes them nowhere else: a
    change that is detected fails the save. An optimizer whose ``step()`` was not observed since the last save, or may
    be in a CUDA graph, is copied before the return."""

    replication: bool | None = None
    """Copy every rank's shard to other nodes; ``None`` = where there are several nodes and a local tier or an agent."""

    replication_factor: int = 2
    """Nodes that hold each shard, its own included."""

    replication_jump: int | None = None
    """Ranks between a rank and the one whose node gets its copy; ``None`` = the ranks of a node."""

    replication_parity: int = 0
    """Instead of copies: nodes whose shards share one XOR parity, which survives the loss of any one of them; 0 =
    copies."""

    replication_timeout: float = 10.0
    """Seconds without progress after which a partner is given up; the save then counts without its copy."""

    replication_key_file: str | None = None
    """File with the secret that nodes prove to each other; ``None`` = derived from the run key, or drawn
    where there is none."""

    most_recent_k: int = 3
    """Newest committed generations to keep in the global tier, at least 2 (the newest may prove bad); -1 = all."""

    local_most_recent_k: int = 2
    """The same for the local tier."""

    save_retain_interval: int = 0
    """Generations whose iteration is a multiple of it are kept forever in the global tier; 0 = none."""

    suspect_window: int = 20
    """Iterations after a load in which an invalid result casts doubt on what was loaded; one generation older than
    that is always kept."""

    prefer_finite: bool = True
    """Load an older generation rather than one that holds numbers that are infinite or NaN; a newer one that is
    skipped is named in the log. Off: always load the newest, for states that hold such numbers now and then."""

    missing: str = "error"
    """``keep``: what the state holds and the checkpoint lacks (an average of the weights, a new layer, its parameters
    in the optimizer) keeps its present value at a load, and one line of the log lists it. ``error``: the load fails."""

    max_consecutive_save_failures: int = 0
    """Saves in a row that reached no tier at all after which training stops with the last error; 0 = never:
    ``max_durable_lag`` is the limit."""

    save_timeout: float = 600.0
    """Seconds that an attempt to commit a save to a tier may take before it counts as failed; to the local and the
    global tier it is then retried, until a newer save takes its place."""

    max_durable_lag: float = 7200.0
    """Seconds for which a commit that survives the end of the job may be due before all ranks exit with 93; 0 = no
    limit. It goes to ``directory``, or without one to the local directory; commits to other tiers do not count. It is
    due from the begin of the oldest save that it would cover, over restarts within the job. A final save is waited for
    as long as is left of it."""

    restore_timeout: float = 900.0
    """Seconds that a start waits for a checkpoint directory or an object store that does not respond, where the
    node-local tiers hold no checkpoint that this job has saved; 0 = do not wait."""

    response_timeout: float = 60.0
    """Seconds without progress after which a call on a checkpoint directory or object store counts as failed while a
    job starts or loads. It must be above 0: a call on a mount that hangs would never return."""

    save: str | None = None
    """Megatron's name of ``directory``."""

    load: str | None = None
    """Global tier to load from when ``directory`` holds no generation yet, for example of another run; read only."""

    resume_from_other_run: bool = False
    """Continue from generations that another run saved in these directories; off: the run is refused there. A run is
    another one if both were given names (``--rdzv-id``, ``--run-dir``) and have none in common, or, where one of them
    has no name, if they run different scripts."""

    non_persistent_local_ckpt_dir: str | None = None
    """Megatron's name of ``local_directory``."""

    non_persistent_local_ckpt_algo: str = "atomic"
    """``atomic`` or Megatron's ``fully_parallel``, with one meaning: each rank's local file holds all of its own state.
    There ranks hold parts of each other's state, and one lost node takes others' state along."""

    non_persistent_ckpt_type: str | None = None
    """Megatron's choice of where non-persistent saves go: ``local`` = memory, replicas and ``local_directory``, which
    must be set; ``in_memory`` = memory and replicas, without a ``local_directory``; none = as the other settings say.
    ``global`` is refused: ``save_interval`` and ``save_retain_interval`` say that."""

    ckpt_format: str = "torch_dist"
    """Megatron's name of the format of ``torch.distributed.checkpoint``, in which the global tier is written; others
    are refused."""

    @classmethod
    def _settle(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values with Megatron's names replaced by ours."""
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
    """Return what to do about state that a checkpoint lacks. Raises: ConfigError, if it is neither keep nor error."""
    require(value in ("keep", "error"), f"missing={value!r} must be 'error' or 'keep'")
    return value
