"""A session's environment: the worker's place, the protection of the run there, and settings without effect."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import re
from collections.abc import Iterable

from outlast.config import CheckpointConfig, Config, FaultToleranceConfig
from outlast.config.launching import LAUNCHERS_OWN
from outlast.config.sources import merge_under
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.monitor.rank_monitor import RankMonitor
from outlast.policy.deadlines import Timeouts, describe_saves
from outlast.runtime.journal import Journal
from outlast.runtime.process_groups import current_place
from outlast.runtime.processes import describe_self
from outlast.runtime.slurm_job import log_job_info
from outlast.session.inprocess_scope import InProcessScope
from outlast.version import __version__

log = logging.getLogger(__name__)


def has_node_local_tier(checkpoint: CheckpointConfig, place: WorkerEnv) -> bool:
    """Return whether a save can go to a node-local tier: a local folder, or the memory of the agent's writer."""
    return checkpoint.local_directory is not None or place.writer is not None


def monitor_settings(config: Config, place: WorkerEnv) -> FaultToleranceConfig:
    """Return the fault tolerance settings of a session's monitor.

    Learned timeouts are stored next to the checkpoints, where the next launch of the same command finds them.
    """
    settings, saves = config.fault_tolerance or FaultToleranceConfig(), config.checkpoint
    in_force = merge_under(place.fault_tolerance if place.board is not None else None, settings)
    if not in_force.calc_ft_timeouts or in_force.state_directory is not None:
        return settings
    if saves is None or saves.directory is None or "://" in saves.directory:
        return settings
    return settings.changed(state_directory=os.path.abspath(saves.directory))


def announce_session(
    config: Config,
    place: WorkerEnv,
    scope: InProcessScope,
    journal: Journal,
    monitor: RankMonitor,
    *,
    watches_signals: bool,
    saved_by: str | None = None,
) -> None:
    """Record a session's start, report the protection to the agent, and log warnings for missing protection.

    Args:
        watches_signals: A signal leads to an orderly end.
        saved_by: Who saves instead of the session; ``None`` = the session, or not known.
    """
    saves = config.checkpoint
    journal.write(
        EventKind.SESSION_STARTED,
        rank=place.global_rank,
        world_size=place.world_size,
        launcher=place.launcher,
        directory=None if saves is None or saves.directory is None else _without_user(str(saves.directory)),
        local_directory=None if saves is None or saves.local_directory is None else str(saves.local_directory),
        max_no_progress_cycles=monitor.config.given.get("max_no_progress_cycles"),
        version=__version__,
        **describe_self(),
    )
    monitor.note_protection(_describe_protection(config, place, watches_signals=watches_signals, saved_by=saved_by))
    if place.is_first and scope.call_number == 0:
        warn_of_missing_protection(
            config,
            place,
            monitor.config,
            watches_signals=watches_signals,
            is_wrapped=scope.is_active,
            saved_by=saved_by,
        )


def warn_of_missing_protection(
    config: Config,
    place: WorkerEnv,
    fault_tolerance: FaultToleranceConfig,
    *,
    watches_signals: bool,
    is_wrapped: bool = False,
    saved_by: str | None = None,
) -> None:
    """Log one line on missing protection and one on settings without effect, each with the remedy.

    Args:
        fault_tolerance: The fault tolerance settings in force.
        is_wrapped: The session is within a function that restarts in process.
        watches_signals: As for :func:`announce_session`, and so is ``saved_by``.
    """
    checkpoint, missing = config.checkpoint, []
    if checkpoint is None and saved_by is None:
        missing.append("nothing is saved or restored (set checkpoint.directory)")
    elif (
        checkpoint is not None
        and checkpoint.non_persistent_save_interval != 0
        and not has_node_local_tier(checkpoint, place)
    ):
        missing.append(
            "non_persistent_save_interval has nothing to save to (set checkpoint.local_directory, or start the script "
            "with outlast run)"
        )
    if fault_tolerance.given.get("enable_ft_package") is False:
        missing.append("a hung rank is not detected (fault_tolerance.enable_ft_package is off)")
    elif (
        Timeouts.of_rank(
            fault_tolerance, configured=fault_tolerance, replaces_dead_ranks=place.replaces_dead_ranks
        ).smallest_s()
        is None
    ):
        missing.append("a hung rank is not detected (set fault_tolerance.rank_section_timeouts)")
    if not watches_signals:
        missing.append("SIGTERM ends this process at once (call outlast.init() in the main thread)")
    if place.launcher == "python":
        missing.append("nothing restarts the script (start it with outlast run)")
    if missing and place.board is None:  # otherwise the agent logs it for the run
        log.warning("off: %s", "; ".join(missing))
    if idle := _settings_without_effect(config, place, is_wrapped=is_wrapped):
        log.warning("without effect here: %s", "; ".join(idle))


def _describe_protection(config: Config, place: WorkerEnv, *, watches_signals: bool, saved_by: str | None) -> str:
    checkpoint = config.checkpoint
    if checkpoint is None:
        return describe_saves(tiers=(), interval=0, near_interval=0, is_notified=watches_signals, saved_by=saved_by)
    tiers = [] if place.writer is None else ["memory"]
    tiers += [str(one) for one in (checkpoint.local_directory, checkpoint.directory) if one is not None]
    near = checkpoint.non_persistent_save_interval if has_node_local_tier(checkpoint, place) else 0
    return describe_saves(
        tiers=tuple(tiers), interval=checkpoint.save_interval, near_interval=near, is_notified=watches_signals
    )


def _settings_without_effect(config: Config, place: WorkerEnv, *, is_wrapped: bool) -> list[str]:
    """Return the settings that have no effect in this place, each with the remedy."""
    idle = []

    def note(section: str, names: Iterable[str], remedy: str) -> None:
        if found := ", ".join(f"{section}.{name}" for name in names):
            idle.append(f"{found} ({remedy})")

    ft, health, restart = config.fault_tolerance, config.health, config.in_process_restart
    if ft is not None and place.board is None:
        of_launcher = (name for name in LAUNCHERS_OWN if name in ft.given)
        note("fault_tolerance", of_launcher, "start the script with outlast run")
        where = (place.run_dir, config.run_dir, monitor_settings(config, place).state_directory)
        if ft.calc_ft_timeouts and not any(where):
            note("fault_tolerance", ["calc_ft_timeouts"], "what is learned is kept in run_dir; name one")
    if health is not None and not place.config_file:
        of_nodes = (name for name in health.given if not name.startswith("process_group_"))
        note("health", of_nodes, "give the file to outlast doctor --config or outlast run --config")
    if restart is not None and not is_wrapped and restart.given.get("enabled") is not False:
        note("in_process_restart", restart.given, "call outlast.init() in a function that Wrapper(config) protects")
    run_dir = None if place.run_dir is None else os.path.abspath(place.run_dir)
    if config.run_dir is not None and run_dir not in (None, os.path.abspath(config.run_dir)):
        idle.append(f"run_dir (it is {place.run_dir}; give outlast run --run-dir, or --config with this file)")
    return idle


def read_place(config: Config, scope: InProcessScope) -> WorkerEnv:
    """Return this worker's place from the environment, ``torch.distributed``, the wrapped call and the config."""
    place = dataclasses.replace(current_place(), call=scope.call_number)
    if scope.call_number == 0:
        try:
            log_job_info()
        except ConfigError as error:  # training does not need it
            log.warning("the Slurm job cannot be read: %s", error)
    if place.run_dir is not None or config.run_dir is None:
        return place
    name = f"directory {os.path.abspath(config.run_dir)}"
    return dataclasses.replace(place, run_dir=config.run_dir, names=(*place.names, name))


def seed_random_numbers(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _without_user(url: str) -> str:
    """Remove the user name and password from a URL: the journal is readable by others."""
    return re.sub(r"://[^/@]*@", "://", url)
