"""Where a job resumes from: the newest generation that proves valid."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from outlast import env
from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.checkpoint.catalogue.entries import Generation, ListedGeneration, ListedPlace

__all__ = ["resolve_resume_path"]

log = logging.getLogger(__name__)


def resolve_resume_path(
    checkpoint_dir: str | os.PathLike[str], *, run_dir: str | os.PathLike[str] | None = None, num_threads: int = 4
) -> Path | str | None:
    """Return the newest generation of which every byte is what was saved; ``None`` when there is none.

    Torn, damaged and foreign ones are skipped, and so is what was saved for diagnosis. Nothing is trusted because
    a tracker names it.

    Args:
        checkpoint_dir: A global directory (path or URL), a ``local_directory``, or one node's folder in it.
        run_dir: The run directory; what its ``ladder.json`` distrusts, because it led to invalid results, is skipped
            too.
        num_threads: Readers.

    Returns:
        The generation's folder (of a local tier: this node's, else the first that holds some of it); a URL when a URL
        was given.

    Raises:
        ConfigError: It is there and is no directory of generations.
        CheckpointError: The store cannot be reached.
        OSError: It cannot be read.

    Blocks: while the newest generation is read.
    """
    from outlast.checkpoint.catalogue.listing import look_into, verify

    name = os.fspath(checkpoint_dir)
    is_url = "://" in name and not name.startswith("file://")
    if not is_url and not Path(name.removeprefix("file://")).exists():
        return None
    looked = look_into(name)
    distrusted = _distrusted_attempts(run_dir, looked.entry)
    for found in sorted(looked.found, key=lambda one: one.entry.iteration, reverse=True):
        why = _why_not(found.entry, distrusted)
        if why is None:
            entry = verify(found, num_threads=num_threads).entry
            if entry.valid:
                return _path_of(found, looked.entry, is_url=is_url)
            why = "; ".join(str(problem) for problem in entry.problems[:3])
        log.warning("generation %d in %s is skipped: %s", found.entry.iteration, name, why)
    return None


def _why_not(entry: Generation, distrusted: frozenset[str]) -> str | None:
    if entry.suspect:
        return "saved for diagnosis"
    if not entry.valid:
        return "; ".join(str(problem) for problem in entry.problems[:3]) or f"ranks {list(entry.missing)} are missing"
    if entry.elsewhere:
        return f"ranks {list(entry.elsewhere)} are on nodes that are not seen from here"
    if entry.attempt in distrusted:
        return "it led to invalid results"
    return None


def _distrusted_attempts(run_dir: str | os.PathLike[str] | None, place: ListedPlace) -> frozenset[str]:
    """Return the attempts in this place that the run's ladder does not load any more."""
    from outlast.launch.verdicts import load_ladder
    from outlast.policy.recovery_point import Copy, Tier, is_distrusted

    distrusted = load_ladder(None if run_dir is None else Path(run_dir), is_new_job=False).distrusted
    tier = Tier.GLOBAL if place.tier == "global" else Tier.LOCAL
    known = [one for one in place.generations if one.attempt is not None]
    lineage = {str(one.attempt): one.restored_attempt for one in known}
    return frozenset(
        str(one.attempt)
        for one in known
        if is_distrusted(Copy(one.iteration, str(one.attempt), tier), lineage, distrusted)
    )


def _path_of(found: ListedGeneration, place: ListedPlace, *, is_url: bool) -> Path | str:
    entry = found.entry
    if is_url:
        return f"{place.path.rstrip('/')}/step-{entry.iteration}"
    if place.tier == "global":
        folder = Path(place.path)
    else:
        nodes = [held.node for held in entry.held]
        own = env.read_worker().node
        node = own if own in nodes else nodes[0]
        folder = Path(place.path) if Path(place.path).name == node and len(place.nodes) == 1 else Path(place.path, node)
    path = folder / f"step-{entry.iteration}"
    if not path.is_dir():
        raise ConfigError(f"{path} was there a moment ago; is something else pruning {place.path}?")
    return path
