"""How a session starts: settings from their sources, the worker's place, a voice, and random numbers."""

from __future__ import annotations

import logging
import os
import random

from outlast import env, logs
from outlast.config import Config, FaultToleranceConfig
from outlast.config.files import load_config
from outlast.errors import ConfigError
from outlast.inprocess.call import current_handle
from outlast.runtime import postmortem
from outlast.runtime.slurm_job import log_job_info
from outlast.session.session import Session

__all__ = ["init"]

log = logging.getLogger(__name__)


def init(config: Config | str | os.PathLike[str] | None = None) -> Session:
    """Start the session of this worker.

    Works the same under ``outlast run``, ``torchrun``, ``srun`` and plain ``python``. With more than one rank
    it initialises ``torch.distributed`` (NCCL where there are GPUs, gloo otherwise) unless that was done
    before; a rank whose script initialised it leaves it no faster than torch does when a peer hangs. The
    fault tolerance settings that ``outlast run`` is given, by option or file, come before those of ``config``, field by
    field, and so does its run directory.
    Unless logging was configured, the package's own lines go to stderr: all warnings, the rest of rank 0.

    Args:
        config: The settings, or a ``.toml``, ``.yaml`` or ``.json`` file of them; ``None`` for the defaults,
            which save nothing.

    Returns:
        The session; use it as a context manager, or call :meth:`Session.close`, to end it before the process
        does.

    Raises:
        ConfigError: A setting is wrong.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the world.
    Blocks: until all ranks have come.
    Thread: the main thread, or notices (SIGTERM) are not handled.
    """
    postmortem.begin_with_hook()
    place = env.read_worker()
    logs.read_settings()
    logs.configure_worker(place.global_rank, place.node)
    if config is None:
        settings = Config()
    elif isinstance(config, Config):
        settings = config
    elif isinstance(config, str | os.PathLike):
        settings = load_config(config)
    else:
        raise ConfigError(f"init() takes an outlast.Config or the path of a config file, not {type(config).__name__}")
    if (call := current_handle()) is None or call.iteration == 0:
        try:
            log_job_info()
        except ConfigError as error:  # it trains all the same
            log.warning("the Slurm job cannot be read: %s", error)
    if settings.seed is not None:
        _seed(settings.seed + place.global_rank)
    return Session(settings, place, settings.fault_tolerance or FaultToleranceConfig())


def _seed(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
