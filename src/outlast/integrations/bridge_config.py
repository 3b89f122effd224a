"""Megatron-Bridge's config classes, with its names, fields and defaults, for scripts that set attributes one by one.

A script keeps its lines (``cfg.checkpoint.async_save = True``) and changes its import; neither Megatron-Core nor Bridge
need to be installed. The values are checked, and cannot be changed any more, once the settings are read: by
``outlast_config(cfg)``, or by what takes one of the sections. A name that is not a setting is refused when it is set.

Rejected: a second set of dataclasses, which are mutable. It would repeat each field, its default and its text. Here a
mixin (:class:`outlast.config.base.Changeable`) is put before the frozen class, which keeps the checks.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from outlast import config as ours
from outlast.config.base import Changeable, require


class RerunSettings(ours.RerunStateMachineConfig):
    """Ours with Bridge's default; Megatron-LM's is ``validate_results``, as ours.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    rerun_mode: str = "disabled"
    """As ours; nothing is judged unless it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCheckpointConfig:
    """The settings of Bridge's ``CheckpointConfig`` that say where and how often is saved; the others are the model's.

    Raises:
        ConfigError: A value has no counterpart here, or contradicts another.
    """

    save: str | None = None
    """Folder that every rank sees."""
    load: str | None = None
    """Folder to load from when ``save`` holds nothing yet."""
    save_interval: int | None = None
    """Iterations between two saves to it; ``None`` = none."""
    most_recent_k: int | None = -1
    """Newest generations to keep there; -1 = all, 1 is refused."""
    save_retain_interval: int | None = None
    """Generations whose iteration is a multiple of it are kept forever."""
    async_save: bool = False
    """Save while training continues."""
    async_strategy: str = "nvrx"
    """``nvrx`` or ``mcore``: the engine saves by itself, whichever it is."""
    ckpt_format: str = "torch_dist"
    """Only this one."""
    non_persistent_save_interval: int | None = None
    """Iterations between two saves near the ranks."""
    non_persistent_ckpt_type: str | None = None
    """``local``: to ``non_persistent_local_ckpt_dir``; ``in_memory``: to memory alone; ``global`` is refused."""
    non_persistent_global_ckpt_dir: str | None = None
    """Refused."""
    non_persistent_local_ckpt_dir: str | None = None
    """A folder on a disk of each node, or in memory."""
    non_persistent_local_ckpt_algo: str = "fully_parallel"
    """``fully_parallel`` or ``atomic``; each rank's file holds all of its own state with both."""
    replication: bool = False
    """Copy local generations to other nodes."""
    replication_jump: int | None = None
    """Ranks between a rank and the one whose node gets its copy; ``None`` = the ranks of a node."""
    replication_factor: int = 2
    """Nodes that hold each part."""
    verify_integrity: bool = False
    """Every byte is compared with its digest before it is loaded, with this and without."""
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
        """Return ours; ``None`` when nothing is saved.

        Raises:
            ConfigError: A value has no counterpart, or contradicts another.
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
    """Stop and save on a signal; Bridge's default is off."""
    exit_signal: int | str = signal.SIGTERM
    """The signal."""
    exit_signal_handler_for_dataloader: bool = False
    """DataLoader workers leave a signal to the process that started them."""
    exit_interval: int | None = None
    """Stop and save after every iteration that this divides; ``None`` = never for that reason."""
    exit_duration_in_mins: float | None = None
    """Minutes after its start at which the run stops and saves; ``None`` = never for that reason."""


class BridgeFaultToleranceConfig(Changeable, ours.FaultToleranceConfig):
    """``cfg.ft``: Bridge's settings, and all others of :class:`outlast.FaultToleranceConfig`."""


class BridgeStragglerDetectionConfig(Changeable, ours.StragglerDetectionConfig):
    """``cfg.nvrx_straggler``; ``cfg.straggler`` is that of Megatron-LM's older detector."""


class BridgeRerunStateMachineConfig(Changeable, RerunSettings):
    """``cfg.rerun_state_machine``."""


class BridgeInProcessRestartConfig(Changeable, ours.InProcessRestartConfig):
    """``cfg.inprocess_restart``."""


class BridgeCheckpointConfig(Changeable, MegatronCheckpointConfig):
    """``cfg.checkpoint``: those of Bridge's settings that say where and how often is saved."""


class TrainingConfig(Changeable, _TrainingSettings):
    """``cfg.train``: those of Bridge's settings that end a training, and what a script needs for its loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sections:
    checkpoint: Any = field(default_factory=BridgeCheckpointConfig)
    """Where and how often is saved."""
    train: Any = field(default_factory=TrainingConfig)
    """When the training ends."""
    ft: Any = None
    """Timeouts; ``None`` = those of the launcher."""
    nvrx_straggler: Any = None
    """Detection of slow ranks; ``None`` = off."""
    straggler: Any = None
    """The older detector, which must be off where ``nvrx_straggler`` is on."""
    rerun_state_machine: Any = field(default_factory=BridgeRerunStateMachineConfig)
    """What follows an invalid result."""
    inprocess_restart: Any = None
    """Restart in process; ``None`` = off."""
    model: Any = None
    """This and all below: the training's own, which outlast does not read."""
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
    """Bridge's container of all settings: ``outlast_config(cfg)`` makes a session's settings of it."""
