"""The folder of a run's generations: its names, what lies in it, and which ranks see the same one.

``step-<n>`` is a committed generation, ``step-<n>.tmp-...`` an attempt, ``step-<n>.aside-...`` what stood in the way
of a newer lineage, ``latest`` a hint for people, and ``run.json`` names the run that the folder belongs to.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outlast.checkpoint.manifest import MANIFEST, Manifest, decode_manifest
from outlast.checkpoint.peers import Peers
from outlast.env import clean_name
from outlast.errors import CheckpointError, Incomplete
from outlast.runtime.files import fsync_folder, write_atomically

__all__ = ["Attempt", "Directory", "agree_directory"]

RUN = "run.json"
TRACKER = "latest"
_GENERATION = re.compile(r"step-(\d+)")
_DOOMED = re.compile(r"step-\d+\.doomed")
_PASSED = re.compile(r"step-\d+\.(?:tmp|aside)-(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Names one attempt to save, among all attempts of all processes."""

    job: str
    cycle: int
    token: str
    """Random, agreed by the ranks of one set of processes."""
    ordinal: int

    def __str__(self) -> str:
        return f"{clean_name(self.job)}-{self.cycle}-{self.token}.{self.ordinal}"


class _Run(msgspec.Struct, frozen=True):
    run: str


class Directory:
    """One folder, as this rank sees it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))

    def generation(self, iteration: int) -> Path:
        """Return the folder of a committed generation."""
        return self.path / f"step-{iteration}"

    def temporary(self, iteration: int, attempt: Attempt) -> Path:
        """Return the folder of an attempt."""
        return self.path / f"step-{iteration}.tmp-{attempt}"

    def generations(self) -> list[int]:
        """Return the iterations that have a folder of a committed name, newest first; whole or not."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for name in names if (match := _GENERATION.fullmatch(name))), reverse=True)

    def manifest(self, iteration: int) -> tuple[Manifest, str]:
        """Read a generation's manifest; return it and its SHA-256.

        Raises:
            CheckpointError: There is none, or it cannot be trusted.
        """
        path = self.generation(iteration) / MANIFEST
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise Incomplete("there is no manifest") from None
        except OSError as error:
            raise CheckpointError(f"the manifest cannot be read ({error.strerror})") from error
        return decode_manifest(data)

    def run(self) -> str | None:
        """Return the run that the folder belongs to; ``None`` when it is new."""
        try:
            return msgspec.json.decode((self.path / RUN).read_bytes(), type=_Run).run
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{self.path / RUN} cannot be read ({error}); restore or delete it") from error

    def commit(self, iteration: int, attempt: Attempt) -> None:
        """Give an attempt its final name; what has that name already is set aside, not written to."""
        final = self.generation(iteration)
        if final.exists():
            os.rename(final, self.path / f"step-{iteration}.aside-{attempt}")
        os.rename(self.temporary(iteration, attempt), final)
        fsync_folder(self.path)

    def point_to(self, iteration: int) -> None:
        """Set the tracker."""
        write_atomically(self.path / TRACKER, f"step-{iteration}\n".encode())

    def claim(self, run: str) -> None:
        """Name the run that the folder belongs to, unless it is named."""
        if not (self.path / RUN).exists():
            write_atomically(self.path / RUN, msgspec.json.encode(_Run(run)))

    def remove_stale(self, attempt: Attempt) -> list[str]:
        """Remove what earlier attempts of this job, and interrupted deletions, left; return the names.

        Only what is provably not in use: of these processes' earlier attempts, which are decided, and of earlier
        cycles and processes of this job, which are gone. Another job's leftovers stay.
        """
        removed = []
        for name in os.listdir(self.path):
            if _DOOMED.fullmatch(name):
                shutil.rmtree(self.path / name, ignore_errors=True)
                removed.append(name)
                continue
            if (match := _PASSED.fullmatch(name)) is None or match["job"] != clean_name(attempt.job):
                continue
            if match["token"] == attempt.token:
                stale = int(match["ordinal"]) < attempt.ordinal
            else:
                stale = int(match["cycle"]) <= attempt.cycle
            if stale:
                shutil.rmtree(self.path / name, ignore_errors=True)
                removed.append(name)
        return removed

    def discard(self, iteration: int, attempt: Attempt) -> None:
        """Delete what a failed attempt wrote: its room may be what the next one lacks."""
        shutil.rmtree(self.temporary(iteration, attempt), ignore_errors=True)

    def remove(self, iteration: int) -> None:
        """Delete a generation: first its name, so that no half of it is ever seen."""
        path = self.generation(iteration)
        doomed = path.with_name(f"{path.name}.doomed")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class _Seen(msgspec.Struct, frozen=True):
    run: str | None
    ranks: list[int]
    generations: list[int]
    """Whole or not."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know alike about their directories."""

    token: str
    run: str
    leaders: tuple[int, ...]
    """The lowest rank of each set of ranks that see the same folder."""
    leader: int
    """The one of this rank's set."""
    members: tuple[int, ...]
    """The ranks of this rank's set."""
    generations: frozenset[int]
    """Generations that some rank sees, whole or not."""


def agree_directory(directory: Directory, peers: Peers) -> Agreed:
    """Make the directory and find out which ranks share it.

    Raises:
        CheckpointError: A rank cannot write into its directory.
        PeerLost: A peer left.

    Collective: all ranks.
    """
    token = peers.gather(os.urandom(4).hex().encode())[0].decode()
    problem = None
    probe = directory.path / f".probe-{token}-{peers.rank}"
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
    except OSError as error:
        problem = f"rank {peers.rank}: {error}"
    _raise_first(peers.gather((problem or "").encode()))
    seen = _look(directory, token)
    everyone = [msgspec.json.decode(data, type=_Seen) for data in peers.gather(msgspec.json.encode(seen))]
    probe.unlink(missing_ok=True)
    _raise_first([(one.error or "").encode() for one in everyone])
    sets = [min(one.ranks) for one in everyone]
    known = [one.run for one in everyone if one.run is not None]
    return Agreed(
        token=token,
        run=known[0] if known else f"run-{token}",
        leaders=tuple(sorted(set(sets))),
        leader=sets[peers.rank],
        members=tuple(rank for rank, leader in enumerate(sets) if leader == sets[peers.rank]),
        generations=frozenset(generation for one in everyone for generation in one.generations),
    )


def _look(directory: Directory, token: str) -> _Seen:
    try:
        names = os.listdir(directory.path)
        prefix = f".probe-{token}-"
        ranks = [int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
        generations = directory.generations()
        return _Seen(directory.run() or _run_of_newest(directory, generations), ranks, generations)
    except (OSError, CheckpointError) as error:
        return _Seen(None, [0], [], str(error))


def _run_of_newest(directory: Directory, generations: list[int]) -> str | None:
    """Return the run that the newest readable manifest names: the folder's own word for it was lost."""
    for iteration in generations:
        try:
            return directory.manifest(iteration)[0].run
        except CheckpointError:
            continue  # the load says why
    return None


def _raise_first(errors: list[bytes]) -> None:
    for error in errors:
        if error:
            raise CheckpointError(f"the checkpoint directory is of no use: {error.decode()}")
