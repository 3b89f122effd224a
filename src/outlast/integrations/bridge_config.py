"""Megatron-Bridge's config classes, with its names, fields and defaults, for scripts that set attributes.

A script keeps its lines (``cfg.checkpoint.async_save = True``) and changes its import; neither Megatron-Core nor Bridge
need to be installed. Values are checked, and then frozen, when ``outlast_config(cfg)`` or another consumer of a section
reads them. Setting an unknown name is refused at once.

Rejected: a second set of mutable dataclasses, which would repeat each field, its default and its text. Instead a mixin
(:class:`outlast.config.base.Changeable`) precedes the frozen class, which keeps the checks.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from outlast import config as ours
from outlast.config.base import Changeable, require


class RerunSettings(ours.RerunStateMachineConfig):
    """Outlast's settings with Bridge's default; Megatron-LM's and outlast's is ``validate_results``.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    rerun_mode: str = "disabled"
    """As in outlast; nothing is judged unless it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCheckpointConfig:
    """The settings of Bridge's ``CheckpointConfig`` for places and intervals of saves; the others belong to the model.

    Raises:
        ConfigError: A value is not supported, or contradicts another.
    """

    save: str | None = None
    """Folder that every rank can access."""
    load: str | None = None
    """Folder to load from while ``save`` is empty."""
    save_interval: int | None = None
    """Iterations between two saves to ``save``; ``None`` = none."""
    most_recent_k: int | None = -1
    """Newest checkpoints to keep there; -1 = all, 1 is refused."""
    save_retain_interval: int | None = None
    """Checkpoints whose iteration is a multiple of it are kept forever."""
    async_save: bool = False
    """Save while training continues."""
    async_strategy: str = "nvrx"
    """``nvrx`` or ``mcore``: outlast's engine saves with both."""
    ckpt_format: str = "torch_dist"
    """Only ``torch_dist``."""
    non_persistent_save_interval: int | None = None
    """Iterations between two saves to node-local tiers."""
    non_persistent_ckpt_type: str | None = None
    """``local``: to ``non_persistent_local_ckpt_dir``; ``in_memory``: to memory alone; ``global`` is refused."""
    non_persistent_global_ckpt_dir: str | None = None
    """Refused."""
    non_persistent_local_ckpt_dir: str | None = None
    """A folder on a disk of each node, or in memory."""
    non_persistent_local_ckpt_algo: str = "fully_parallel"
    """``fully_parallel`` or ``atomic``; with both, each rank's file contains its complete state."""
    replication: bool = False
    """Copy local checkpoints to other nodes."""
    replication_jump: int | None = None
    """Ranks between a rank and the one whose node gets its copy; ``None`` = the ranks of a node."""
    replication_factor: int = 2
    """Nodes that hold each part."""
    verify_integrity: bool = False
    """No effect: every byte is always verified against its digest before it is loaded."""
    custom_manager_class: str | None = None
    """Only ``outlast.integrations.megatron.BridgeCheckpointManager``."""

    def __post_init__(self) -> None:
        text = f"async_strategy={self.async_strategy!r} must be nvrx or mcore; the engine saves by itself with both"
        require(self.async_strategy in ("nvrx", "mcore"), text)
        text = (
            f"non_persistent_global_ckpt_dir={self.non_persistent_global_ckpt_dir!r} is not supported: non-persistent "
            "checkpoints are stored in node-local tiers; set non_persistent_local_ckpt_dir, or reduce save_interval"
        )
        require(self.non_persistent_global_ckpt_dir is None, text)
        own = "outlast.integrations.megatron.BridgeCheckpointManager"
        text = f"custom_manager_class={self.custom_manager_class!r} is not outlast's; leave it out, or write {own}"
        require(self.custom_manager_class in (None, own), text)
        require(
            not self.async_save or self.ckpt_format == "torch_dist",
            f"async_save works with ckpt_format='torch_dist' only, not {self.ckpt_format!r}",
        )
        if self._saves_somewhere:
            self.to_outlast()  # its checks
            return
        self._make("unset")  # the same checks
        for name in ("load", "non_persistent_save_interval", "non_persistent_ckpt_type", "replication"):
            text = f"{name}={getattr(self, name)!r} has no effect, as nothing is saved: set save, or leave {name} out"
            require(getattr(self, name) in (None, 0, False, "None"), text)

    def to_outlast(self) -> ours.CheckpointConfig | None:
        """Return outlast's settings; ``None`` if nothing is saved.

        Raises:
            ConfigError: A value is not supported, or contradicts another.
        """
        return self._make(self.save) if self._saves_somewhere else None

    @property
    def _saves_somewhere(self) -> bool:
        return self.save is not None or self.non_persistent_local_ckpt_dir is not None

    def _make(self, directory: str | None) -> ours.CheckpointConfig:
        kind = self.non_persistent_ckpt_type
        same: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        same |= {name: getattr(self, name) or 0 for name in _INTERVALS}
        return ours.CheckpointConfig(
            directory=directory,
            load=self.load if self.load != self.save else None,
            most_recent_k=self.most_recent_k if self.most_recent_k is not None else -1,
            non_persistent_ckpt_type=None if kind == "None" else kind,
            local_directory=self.non_persistent_local_ckpt_dir,
            **same,
        )


_SAME = (
    *("async_save", "ckpt_format", "non_persistent_local_ckpt_algo"),
    *("replication", "replication_jump", "replication_factor"),
)
_INTERVALS = ("save_interval", "save_retain_interval", "non_persistent_save_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainingSettings:
    train_iters: int | None = None
    """Iterations of the training, for the script: ``run.steps(state, total=cfg.train.train_iters)``."""
    global_batch_size: int | None = None
    """For the script."""
    micro_batch_size: int | None = None
    """For the script."""
    exit_signal_handler: bool = True
    """Save and exit on a signal; Bridge's default is off."""
    exit_signal: int | str = signal.SIGTERM
    """The signal."""
    exit_signal_handler_for_dataloader: bool = False
    """DataLoader workers ignore the signal; their parent process handles it."""
    exit_interval: int | None = None
    """Save and exit after every iteration that is a multiple of it; ``None`` = never for that reason."""
    exit_duration_in_mins: float | None = None
    """Minutes after its start at which the run saves and exits; ``None`` = never for that reason."""


class BridgeFaultToleranceConfig(Changeable, ours.FaultToleranceConfig):
    """``cfg.ft``: Bridge's settings, and all others of :class:`outlast.FaultToleranceConfig`."""


class BridgeStragglerDetectionConfig(Changeable, ours.StragglerDetectionConfig):
    """``cfg.nvrx_straggler``; ``cfg.straggler`` belongs to Megatron-LM's older detector."""


class BridgeRerunStateMachineConfig(Changeable, RerunSettings):
    """``cfg.rerun_state_machine``."""


class BridgeInProcessRestartConfig(Changeable, ours.InProcessRestartConfig):
    """``cfg.inprocess_restart``."""


class BridgeCheckpointConfig(Changeable, MegatronCheckpointConfig):
    """``cfg.checkpoint``: Bridge's settings for places and intervals of saves."""


class TrainingConfig(Changeable, _TrainingSettings):
    """``cfg.train``: Bridge's settings that end a training, and values for the script's loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sections:
    checkpoint: Any = field(default_factory=BridgeCheckpointConfig)
    """Places and intervals of saves."""
    train: Any = field(default_factory=TrainingConfig)
    """When the training ends."""
    ft: Any = None
    """Timeouts; ``None`` = those of the launcher."""
    nvrx_straggler: Any = None
    """Detection of slow ranks; ``None`` = off."""
    straggler: Any = None
    """The older detector, which must be off where ``nvrx_straggler`` is on."""
    rerun_state_machine: Any = field(default_factory=BridgeRerunStateMachineConfig)
    """Reaction to an invalid result."""
    inprocess_restart: Any = None
    """In-process restart; ``None`` = off."""
    model: Any = None
    """This section and all below belong to the training; outlast does not read them."""
    optimizer: Any = None
    optimizer_config_override_provider: Any = None
    scheduler: Any = None
    dataset: Any = None
    validation: Any = None
    logger: Any = None
    tokenizer: Any = None
    ddp: Any = None
    dist: Any = None
    rng: Any = None
    profiling: Any = None
    peft: Any = None
    comm_overlap: Any = None
    mixed_precision: Any = None
    tensor_inspect: Any = None


class ConfigContainer(Changeable, _Sections):
    """Bridge's container of all settings; ``outlast_config(cfg)`` converts it to a session's settings."""
