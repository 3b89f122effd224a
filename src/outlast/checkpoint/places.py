"""The agreement of all ranks at the start: nodes and their leaders, directories, and copies that each save sends to
others.

All of it is agreed once, through :class:`Peers`. Other nodes get whole copies (partners), or blocks for parities
(groups).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from outlast import clock
from outlast.checkpoint import protocol as f
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.store import is_remote
from outlast.checkpoint.directory import Claim, Directory, DirectoryContent, DirectoryRefused, Refusal, look_at
from outlast.checkpoint.manifest import MANIFEST, decode_manifest, run_of, topology_digest
from outlast.checkpoint.outage import (
    AT_FAULT_FIRST_S,
    MIN_AGREEMENT_S,
    Outage,
    OutageWait,
    UnavailableToPeer,
    describe_outage,
    pause,
)
from outlast.checkpoint.replica.client import Holder, Target
from outlast.checkpoint.replica.parity import holders_of
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.decoding import from_json, read_file
from outlast.env import WorkerEnv, clean_name
from outlast.errors import CheckpointError, ConfigError, OutlastError, PeerLost, Unavailable
from outlast.policy.checkpoint_plan import choose_partners, parity_groups
from outlast.policy.lease import LeaseOwner, RunEvidence, choose_run, find_owner
from outlast.policy.recovery_point import NONE_DURABLE, Tier
from outlast.runtime.addresses import own_address
from outlast.runtime.process_groups import Group, find_first, gather_bytes
from outlast.runtime.processes import this_process, this_program
from outlast.runtime.run_key import accept_offer, make_offer
from outlast.runtime.storage_calls import StorageCalls, is_blocked, is_outage
from outlast.wording import count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
R = TypeVar("R")
SERVE_TIMEOUT_S = 30.0
_PROBE_BYTES = 64 * 1024
_MAX_KEY_BYTES = 1 << 16
SAME_VIEW_S = 10.0
"""Seconds in which every node has to see a file that another node wrote to the global tier: a mount may be late."""
_LOOK_S = 0.1
_OF_JOB = re.compile(r"\d+-[0-9a-f]+\.\d+")
"""The part of a save attempt's name after the job."""
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})
MAX_NAMED = 3


class Peers:
    """All ranks that save and load together; also usable with one rank.

    Args:
        timeout_s: Longest time that a request to the ranks' store waits.
        gather_timeout_s: Longest time that a gather waits; ``None`` = the same.

    Collective: all ranks.
    """

    def __init__(self, rank: int, world_size: int, *, timeout_s: float, gather_timeout_s: float | None = None) -> None:
        self.rank, self.world_size, self._timeout_s = rank, world_size, timeout_s
        self._gather_timeout_s = timeout_s if gather_timeout_s is None else gather_timeout_s
        self._group = Group.share(timeout_s=self._gather_timeout_s) if world_size > 1 else None

    def gather(self, kind: Any, value: Any) -> list[Any]:
        """Return every rank's value, by rank; all of one type that JSON can represent.

        Raises:
            PeerLost: A peer left, or did not respond in time.

        Collective: all ranks.
        Blocks: until all ranks have called it.
        """
        data = msgspec.json.encode(value)
        everyone = [data] if self._group is None else self._exchange(gather_bytes, data)
        return [from_json(one, kind) for one in everyone]

    def find_first(self, text: str) -> str:
        """Return, on all ranks, the first non-empty text by rank, else "". Raises, blocks: as :meth:`gather`."""
        return text if self._group is None else self._exchange(find_first, text.encode()).decode()

    def _exchange(self, exchange: Callable[[ProcessGroup, bytes], R], data: bytes) -> R:
        assert self._group is not None
        try:
            found = exchange(self._group.open_group, data)
        except RuntimeError as error:
            if _TIMED_OUT.search(str(error)):
                raise PeerLost(
                    f"the ranks could not agree on a checkpoint: a rank did not respond for "
                    f"{self._gather_timeout_s:.0f} s ({error}); see the logs of the ranks for the one that waits"
                ) from error
            raise PeerLost(
                f"the connection to a peer ended while the ranks agreed on a checkpoint ({error}); see the log of the "
                "rank that exited"
            ) from error
        if self._group is None or self._group.is_cut:
            raise PeerLost("this rank left its process group while the ranks agreed on a checkpoint; see its log")
        return found

    def store(self) -> Any:
        from torch.distributed import HashStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        if self._group is None:
            return HashStore()
        default: Any = _get_default_store()
        store = default.clone()
        store.set_timeout(datetime.timedelta(seconds=self._timeout_s))
        return store

    def close(self) -> None:
        """Disconnect, without waiting for peers. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def cut(self) -> None:
        """Fail all waits for peers. Thread: any."""
        if self._group is not None:
            self._group.cut()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    targets: tuple[Target, ...] = ()
    """Writers that receive a whole copy."""
    holders: tuple[Holder, ...] = ()
    """Members of the rank's parity group, each of which receives a block."""
    parity: int = 0
    """Number of nodes whose shards share one parity; 0 = copies, or nothing."""
    timeout_s: float = 10.0
    """Seconds without progress after which a transfer to another node is abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Directories, nodes and names that this rank uses; most are the same on all ranks."""

    directory: GlobalDirectory | None
    local: Directory | None
    """This node's folder of the local tier."""
    memory: bool
    """Whether the writer, and what it holds, outlives this worker."""
    token: str
    """Random; identifies this set of processes."""
    run: str
    home: str
    """Identifies the configured directories; checkpoints in memory belong to those of their save."""
    node: str
    nodes: tuple[str, ...]
    leaders: tuple[int, ...]
    targets: dict[str, Target]
    """Address of each node's writer for copies; empty without replication."""
    checkpoints: frozenset[int]
    """Checkpoints that some rank sees in some tier, intact or damaged."""
    global_error: str | None
    """Error of listing the global tier at the start; ``None`` = none, or there is no global tier."""
    local_error: str | None = None
    """Error of listing this node's folder at the start; ``None`` = none, or there is no local tier."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Local folder of each node, for people; empty without a local tier."""
    job: str = ""
    durable_iteration: int | None = None
    """See :class:`~outlast.env.WorkerEnv`."""
    waited_s: float = 0.0
    """Seconds that the start has waited for a directory that did not respond."""
    replication: Replication
    seen_local: DirectoryContent | None
    """Content of this node's folder at the start; ``None`` = unknown, or there is none."""
    seen_global: DirectoryContent | None
    """Content of the global tier at the start, on rank 0; ``None`` = unknown, or there is none."""

    @property
    def topology(self) -> str:
        return topology_digest(len(self.nodes))

    @property
    def tiers(self) -> frozenset[Tier]:
        there = {
            Tier.MEMORY: self.memory,
            Tier.LOCAL: self.local is not None,
            Tier.REPLICA: bool(self.targets),
            Tier.GLOBAL: self.directory is not None,
        }
        return frozenset(tier for tier, is_there in there.items() if is_there)

    def is_leader(self, rank: int) -> bool:
        return rank in self.leaders

    def members(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other, node in enumerate(self.nodes) if node == self.nodes[rank])


class _PlaceView(msgspec.Struct):
    """Errors of one rank's check of a directory."""

    error: str | None = None
    """Why its content is unknown; ``None`` = it is known."""
    is_away: bool = False
    unwritable: str | None = None
    """Why it cannot be written, although it can be listed."""

    def note(self, error: Exception | None, text: str, *, where: str, is_written: bool = False) -> None:
        """Record an error; ``where`` is a prefix of the text for errors that depend on the node."""
        if is_written and isinstance(error, OSError) and error.errno in _UNWRITABLE:
            self.unwritable = text
        elif error is not None and self.error is None:
            self.error, self.is_away = f"{where}{text}", is_outage(error)


class _RankView(msgspec.Struct, kw_only=True):
    """One rank's view of the directories."""

    node: str
    ranks: list[int]
    """The ranks that see the same local folder; empty = it cannot be written or listed."""
    folder: str = ""
    near: list[RunEvidence] = []
    """From this node's memory, and, on the lowest of these ranks, its folder."""
    of_job: bool = False
    far: RunEvidence | None = None
    """From the global tier, on rank 0."""
    checkpoints: set[int] = set()
    host: str = ""
    port: int = 0
    error: str | None = None
    looks: bool = False
    global_: _PlaceView = msgspec.field(default_factory=_PlaceView)
    local: _PlaceView = msgspec.field(default_factory=_PlaceView)
    lacks_probe: bool = False
    """This node does not see the file that rank 0 has written to the global tier."""
    newest: tuple[int, str] | None = None
    """Newest checkpoint, on the first rank of each node, if no file of rank 0 shows that the nodes see one place; see
    :func:`_find_newest`."""


def storage_calls(config: CheckpointConfig, *, rank: int, node: str) -> StorageCalls:
    return StorageCalls(f"rank {rank} on node {node}", timeout_s=config.response_timeout)


def agreement_timeout_s(config: CheckpointConfig) -> float:
    """Return the time limit of an agreement while a job starts: longer than each rank's own, bounded waits."""
    return max(config.save_timeout, config.restore_timeout + 4 * config.response_timeout, MIN_AGREEMENT_S)


def agree_places(config: CheckpointConfig, place: WorkerEnv, peers: Peers, writer: WriterClient) -> Places:
    """Create the folders, find the ranks that share a node, and exchange the writers' addresses.

    If the global tier does not respond and the node-local tiers hold no checkpoint of this job, all ranks wait for it
    together: the run's identity must not depend on a failed listing.

    Raises:
        CheckpointError: A rank cannot use any of its folders, or a place did not respond for ``restore_timeout``.
        ConfigError: ``replication`` is on, but nothing can hold a copy, or the ranks of a node use different folders.
        PeerLost: A peer is gone.

    Collective: all ranks.
    Blocks: up to ``restore_timeout`` where a place does not respond.
    """
    directory = GlobalDirectory.open(config.directory) if config.directory is not None else None
    local = None
    if config.local_directory is not None:
        local = Directory(Path(config.local_directory) / clean_name(place.node))
    can_hold = local is not None or writer.outlives_worker
    offered = secrets.token_hex(4), make_offer(), home_digest(config), _name_places(config)
    drawn = peers.gather(tuple[str, str, str, str], offered)
    _check_same_places([kinds for _, _, _, kinds in drawn])
    if config.replication and not can_hold:
        raise ConfigError(
            "replication=true, but nothing outlives a worker here: set local_directory, or start with outlast run"
        )
    (token, _, home, _), secret = drawn[0], _replication_key(config, [offer for _, offer, _, _ in drawn])
    replicates = config.replication is not False and can_hold and peers.world_size > 1
    look = _PlacesLook(
        directory=directory,
        local=local,
        token=token,
        home=home,
        place=place,
        peers=peers,
        writer=writer,
        secret=secret if replicates else None,
        calls=storage_calls(config, rank=peers.rank, node=place.node),
    )
    wait = OutageWait(peers, limit_s=config.restore_timeout)
    try:
        while True:
            everyone = look.gather_views()
            _raise(next((one.error for one in everyone if one.error), ""))
            problem, blamed = _find_outage(everyone, directory)
            if not problem or any(one.of_job for one in everyone):
                break
            if wait.pause(problem, partial_limit_s=config.response_timeout if blamed else None):
                continue
            if blamed or directory is None or not any(one.near for one in everyone):
                raise_outage(problem, wait.waited_s, blamed, rank=peers.rank, node=place.node)
            if peers.rank == 0:
                log.warning("%s; the start continues with the checkpoints of the node-local tiers", problem)
            break
        if not problem and directory is not None:
            look.agree_view(config.directory, everyone)
    finally:
        look.remove_probes()
    look.warn()
    nodes = _name_nodes(everyone, by_folder=local is not None)
    leaders = tuple(sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values()))
    targets = {}
    if replicates and len(leaders) > 1:
        _check_one_folder_per_node(everyone, leaders)
        targets = {
            nodes[rank]: Target(node=nodes[rank], host=everyone[rank].host, port=everyone[rank].port)
            for rank in leaders
        }
    if place.cycle == 0 and not any(one.near for one in everyone):
        _check_usable(config, everyone, is_remote=directory is not None and directory.is_remote)
    known_run = choose_run(everyone[0].far, [place for one in everyone for place in one.near])
    return Places(
        directory=directory,
        local=local,
        memory=writer.outlives_worker,
        token=token,
        run=known_run if known_run is not None else f"run-{token}",
        home=home,
        node=nodes[peers.rank],
        nodes=nodes,
        leaders=leaders,
        targets=targets,
        checkpoints=frozenset(checkpoint for one in everyone for checkpoint in one.checkpoints),
        global_error=_global_error(everyone),
        local_error=everyone[peers.rank].local.error,
        folders={nodes[rank]: everyone[rank].folder for rank in leaders if everyone[rank].folder},
        job=clean_name(place.job),
        durable_iteration=place.durable_iteration,
        waited_s=wait.waited_s,
        replication=plan_replication(config, nodes, targets, peers.rank),
        seen_local=look.seen_local,
        seen_global=look.seen_global,
    )


def _global_error(everyone: Sequence[_RankView]) -> str | None:
    return next((one.global_.error for one in everyone if one.global_.error is not None), None)


def _find_outage(everyone: Sequence[_RankView], directory: GlobalDirectory | None) -> tuple[str, list[int]]:
    """Return why the checkpoints of a start are unknown, if they are, and the affected ranks unless all are affected.

    A node's folder that does not respond does not matter if the global tier responds: the node continues without it.
    """
    views = {
        rank: one.local if directory is None else one.global_
        for rank, one in enumerate(everyone)
        if directory is None or one.looks
    }
    away = [rank for rank, view in views.items() if view.is_away]
    if not away:
        return "", []
    return str(views[away[0]].error), [] if len(away) == len(views) else away


def raise_outage(problem: str, waited_s: float, blamed: Sequence[int], *, rank: int, node: str) -> NoReturn:
    """Raise, on all ranks, that a place does not respond.

    Args:
        problem: The place, the rank, and since when; the same on all ranks.
        waited_s: Seconds that the start has waited.
        blamed: The ranks for which it does not respond while it responds for others; empty = it responds for no rank.

    Raises:
        Outage: It responds for no rank.
        Unavailable: It does not respond for this rank.
        UnavailableToPeer: It does not respond for another rank.

    Blocks: on ranks for which it responds, for 5 s.
    """
    if not blamed:
        raise Outage(describe_outage(problem, waited_s))
    text = (
        f"{problem}; it responds for other ranks: check the mount or the network of that node; no checkpoint was "
        "changed"
    )
    if rank in blamed:
        raise Unavailable(text, rank=rank, node=node)
    # The first report ends the cycle, and the recovery policy blames its node: that has to be the affected rank's.
    pause(AT_FAULT_FIRST_S)
    raise UnavailableToPeer(text, rank=blamed[0])


def _check_usable(config: CheckpointConfig, everyone: Sequence[_RankView], *, is_remote: bool) -> None:
    """Check, if there are no checkpoints yet, that each rank has a usable directory. Raises: Unavailable."""
    of_local = [one.local.unwritable or one.local.error for one in everyone]
    why = _global_error(everyone)
    if why is None and config.directory is not None and (config.local_directory is None or any(of_local)):
        why = everyone[0].global_.unwritable
    if why is not None:
        remedy = "check its address and credentials" if is_remote else "make it writable, or name another"
        raise Unavailable(f"directory={config.directory} cannot be used: {why}; {remedy}")
    if config.directory is None:
        _raise(next(filter(None, of_local), ""))
    _raise(next((one.local.error for one in everyone if one.local.error and not one.local.is_away), ""))


@dataclass(slots=True, kw_only=True)
class _PlacesLook:
    directory: GlobalDirectory | None
    local: Directory | None
    token: str
    home: str
    place: WorkerEnv
    peers: Peers
    writer: WriterClient
    secret: bytes | None
    calls: StorageCalls
    seen_local: DirectoryContent | None = None
    """Content of this node's folder at the last check; ``None`` = it could not be listed, or there is none."""
    seen_global: DirectoryContent | None = None
    """The same for the global tier, on rank 0."""
    _view: _RankView | None = None
    _local_try: int = 1
    """Number of this rank's probe file: an abandoned write that ends later removes only its own file."""
    _global_try: int = 1
    """The same for rank 0's file in the global tier."""
    _probed: int = 0
    """Number of the file that rank 0 has written to the global tier; 0 = none; the same on all ranks."""

    @property
    def _probe(self) -> Path | None:
        if self.local is None:
            return None
        return self.local.path / f".probe-{self.token}-{self.peers.rank}.{self._local_try}"

    @property
    def _shared(self) -> Path | None:
        if self.directory is None or self.directory.is_remote:
            return None
        return Path(self.directory.url) / f".probe-{self.token}.{self._probed or self._global_try}"

    @property
    def _looks(self) -> bool:
        return self.directory is not None and (self.peers.rank == 0 or self.place.local_rank == 0)

    def gather_views(self) -> list[_RankView]:
        """Return every rank's view. Raises: PeerLost. Collective. Blocks: up to ``response_timeout`` for each place."""
        self._view = view = _RankView(node=self.place.node, ranks=[self.peers.rank], looks=self._looks)
        if self.local is not None and self._probe is not None:
            view.folder = self.local.url if self.place.local_rank == 0 else ""
            problem = self._write(self.local.url, self._probe)
            self._local_try += problem is not None
            self._note_local(view, problem, is_written=True)
        if self.peers.rank == 0 and self._shared is not None and not self._probed:
            problem = self._write(str(self._shared.parent), self._shared)
            self._probed = self._global_try if problem is None else 0
            self._global_try += problem is not None
            self._note_global(view, problem, is_written=True)
        self._probed = self.peers.gather(int, self._probed)[0]
        self._look_global(view)
        self._look_local(view)
        self._look_at_writer(view)
        return self.peers.gather(_RankView, view)

    def _write(self, url: str, probe: Path) -> CheckpointError | OSError | None:
        try:
            self.calls.run(
                url,
                partial(_write_probe, probe),
                operation="write",
                discard=lambda _: probe.unlink(missing_ok=True),
            )
        except (CheckpointError, OSError) as error:
            return error
        return None

    def _note_local(self, view: _RankView, error: Exception | None, *, is_written: bool = False) -> None:
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        text = f"local_directory={self.local.path.parent if self.local else ''}: {reason}"
        view.local.note(error, text, where=f"node {self.place.node}: ", is_written=is_written)

    def _note_global(self, view: _RankView, error: Exception | None, *, is_written: bool = False) -> None:
        where = "" if self.peers.rank == 0 else f"node {self.place.node}: "
        view.global_.note(error, str(error), where=where, is_written=is_written)

    def _look_global(self, view: _RankView) -> None:
        directory, shared = self.directory, self._shared
        if directory is None or not self._looks or view.global_.error is not None:
            return

        def look() -> tuple[RunEvidence, DirectoryContent] | None:
            if self.peers.rank != 0:
                return None
            seen = look_at(directory)
            return _evidence(seen, directory.named_runs()), seen

        def compare() -> tuple[bool, tuple[int, str] | None]:
            if self._probed and shared is not None:
                return not shared.exists(), None  # os.path.exists would hide the errors of a lost mount
            return False, _find_newest(directory)

        try:
            if (found := self.calls.run(directory.url, look, operation="list")) is not None:
                view.far, self.seen_global = found
                view.checkpoints.update(self.seen_global.checkpoints)
            if self.place.local_rank == 0:
                view.lacks_probe, view.newest = self.calls.run(directory.url, compare, operation="list")
        except (CheckpointError, OSError) as error:
            self._note_global(view, error)

    def _look_local(self, view: _RankView) -> None:
        local = self.local
        if local is None or view.local.error is not None:
            return
        prefix = f".probe-{self.token}-"

        def look() -> tuple[list[int], DirectoryContent, RunEvidence, bool]:
            names = local.names()
            seen = look_at(local)
            ranks = sorted({int(name.removeprefix(prefix).split(".")[0]) for name in names if name.startswith(prefix)})
            of_job = False
            for newest in seen.checkpoints[:1]:
                with contextlib.suppress(CheckpointError):
                    attempt, durable = local.manifest(newest)[0].attempt, self.place.durable_iteration
                    of_job = is_newest_of_run(newest, attempt, job=clean_name(self.place.job), durable=durable)
            return ranks, seen, _evidence(seen, local.named_runs()), of_job

        try:
            view.ranks, self.seen_local, evidence, view.of_job = self.calls.run(local.url, look, operation="list")
        except (CheckpointError, OSError) as error:
            self._note_local(view, error)
            view.ranks = []
            return
        view.checkpoints.update(self.seen_local.checkpoints)
        if self.peers.rank not in view.ranks:
            view.ranks = []
        if self.peers.rank == min(view.ranks) if view.ranks else self.place.local_rank == 0:
            view.near.append(evidence)

    def _look_at_writer(self, view: _RankView) -> None:
        """List the writer's checkpoints, and have it serve other nodes; errors end the start on all ranks."""
        writer = self.writer
        try:
            if writer.outlives_worker:
                held, _ = writer.ask(f.List(), f.Listed, timeout_s=SERVE_TIMEOUT_S)
                found = [decode_manifest(one.manifest)[0] for one in held.checkpoints]
                manifests = [manifest for manifest in found if manifest.home == self.home]
                view.checkpoints.update(manifest.iteration for manifest in manifests)
                view.near += [RunEvidence(None, manifest.run, manifest.iteration) for manifest in manifests[-1:]]
                job, durable = clean_name(self.place.job), self.place.durable_iteration
                view.of_job |= any(
                    is_newest_of_run(one.iteration, one.attempt, job=job, durable=durable) for one in manifests[-1:]
                )
            if self.secret is not None:
                view.host = own_address(self.place.master_addr)
                folder = None if self.local is None else self.local.url
                request = f.Serve(host=view.host, secret=self.secret, folder=folder)
                view.port = writer.ask(request, f.Serving, timeout_s=SERVE_TIMEOUT_S)[0].port
        except (OSError, OutlastError) as error:
            view.error = f"rank {self.peers.rank}: {error}"

    def agree_view(self, setting: str | None, everyone: Sequence[_RankView]) -> None:
        """Check that all nodes see the same global tier. Raises, blocks: as :func:`_agree_view`. Collective."""
        assert self.directory is not None
        setting, node = f"directory={setting}", self.place.node
        shared = self._shared
        if shared is not None and self._probed:
            if any(one.lacks_probe for one in everyone):
                sees = shared.exists if self.place.local_rank == 0 else None
                _agree_view(setting, os.fspath(shared.parent), self.peers, sees, node=node, calls=self.calls)
        elif everyone[0].global_.error is None:
            mine = everyone[self.peers.rank].newest
            views = {one.newest for one in everyone}
            _agree_newest(setting, self.directory, self.peers, mine, views, node=node, calls=self.calls)

    def remove_probes(self) -> None:
        for probe in (self._probe, self._shared if self.peers.rank == 0 else None):
            if probe is None:
                continue
            remove = partial(probe.unlink, missing_ok=True)
            url = str(probe.parent)
            if is_blocked(url):
                threading.Thread(target=_try, args=(remove,), name="outlast-storage", daemon=True).start()
            else:
                with contextlib.suppress(CheckpointError, OSError):
                    self.calls.run(url, remove, operation="remove a file")

    def warn(self) -> None:
        view, node = self._view, self.place.node
        if view is None:
            return
        if self.place.local_rank == 0 and (why := view.local.error or view.local.unwritable) is not None:
            log.warning(
                "node %s: the local tier cannot be used at present (%s); training continues with the other tiers",
                *(node, why.removeprefix(f"node {node}: ")),
            )
        if self.peers.rank == 0 and view.global_.unwritable is not None:
            log.warning(
                "node %s: the global tier cannot be written at present (%s); training continues with the other tiers",
                *(node, view.global_.unwritable),
            )


def is_of_job(attempt: str, job: str) -> bool:
    """Return whether a save attempt belongs to a job, by the attempt's name."""
    return bool(job) and _OF_JOB.fullmatch(attempt.removeprefix(f"{job}-")) is not None and attempt.startswith(job)


def is_newest_of_run(iteration: int, attempt: str, *, job: str, durable: int | None) -> bool:
    """Return whether no tier can hold a newer checkpoint of the run than this one of a node-local tier.

    Args:
        job: This job, as in the names of attempts; it saves to memory first.
        durable: The newest iteration whose checkpoint survives the end of the job; ``None`` = not known.
    """
    return is_of_job(attempt, job) if durable is None or durable == NONE_DURABLE else iteration >= durable


def _try(work: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        work()


def _agree_view(
    setting: str, url: str, peers: Peers, sees: Callable[[], bool] | None, *, node: str, calls: StorageCalls
) -> None:
    """Wait until all nodes see the same directory.

    A missing mount leaves an empty directory on one node: on rank 0, training would start from the beginning despite
    the checkpoints that other nodes see; on another rank, no save would succeed.

    Args:
        sees: Returns whether this node sees another node's file or checkpoint; ``None`` = another rank of the node
            checks.

    Raises:
        ConfigError: A node has another directory of that name.
        Unavailable: The directory stopped responding.
        PeerLost: A peer is gone.

    Collective: all ranks.
    Blocks: up to :data:`SAME_VIEW_S`, plus the time of one listing.
    """
    end_ns, view, problem = clock.now_ns() + int(SAME_VIEW_S * 1e9), ("", True), ""
    if sees is not None:
        try:
            while not (is_same := calls.run(url, sees, operation="list")) and clock.now_ns() < end_ns:
                time.sleep(_LOOK_S)
            content = calls.run(url, partial(_describe_content, url), operation="list")
            view = f"node {node} sees {content} in {url}", is_same
        except (CheckpointError, OSError) as error:
            problem = f"node {node}: {error}"
    everyone = peers.gather(tuple[str, bool, str], (*view, problem))
    views = [(text, is_same) for text, is_same, _ in everyone]
    if away := [rank for rank, one in enumerate(everyone) if one[2]]:
        looked = [rank for rank, one in enumerate(everyone) if one[0] or one[2]]
        blamed = [] if looked == away else away
        raise_outage(everyone[away[0]][2], 0.0, blamed, rank=peers.rank, node=node)
    others = [text for text, is_same in views if not is_same]
    if others:
        more = f"; and {count(len(others) - MAX_NAMED, 'more node')}" if len(others) > MAX_NAMED else ""
        seen = next((text for text, is_same in views if text and is_same), "")
        raise ConfigError(
            f"{setting} is not the same on all nodes: {'; '.join(filter(None, [seen, *others[:MAX_NAMED]]))}{more}; "
            + (
                "give all of them the same endpoint, credentials and bucket"
                if is_remote(url)
                else "mount the same file system on all of them, or name a directory that all of them share"
            )
        )


def agree_source(
    url: str, directory: GlobalDirectory, places: Places, peers: Peers, *, calls: StorageCalls, limit_s: float
) -> str:
    """Check that a directory that this run only loads from contains the same checkpoints on all nodes.

    Args:
        limit_s: Seconds that the ranks wait for a directory that does not respond.

    Returns:
        The run that it belongs to; empty = unknown.

    Raises:
        ConfigError: Some nodes see another newest checkpoint there, or none.
        Unavailable: The directory does not respond.
        PeerLost: A peer is gone.

    Collective: all ranks.
    Blocks: up to :data:`SAME_VIEW_S` where the nodes differ, and up to ``limit_s``.
    """
    looks, wait = places.is_leader(peers.rank), OutageWait(peers, limit_s=limit_s)

    def look() -> tuple[tuple[int, str], str]:
        newest = _find_newest(directory)
        return newest, (directory.run() or "") if peers.rank == 0 else ""

    while True:
        newest, run, problem, is_away = None, "", "", False
        if looks:
            try:
                newest, run = calls.run(directory.url, look, operation="list")
            except (CheckpointError, OSError) as error:
                newest, problem, is_away = _NOTHING, f"load={url}: {error}", is_outage(error)
                log.debug("%s cannot be read: %s", url, error)
        found = newest, run, problem if is_away else ""
        everyone = peers.gather(tuple[tuple[int, str] | None, str, str], found)
        if not (away := [rank for rank, one in enumerate(everyone) if one[2]]):
            break
        blamed = [] if [rank for rank, one in enumerate(everyone) if one[0] is not None] == away else away
        text = everyone[away[0]][2]
        if not wait.pause(text, partial_limit_s=calls.timeout_s if blamed else None):
            raise_outage(text, wait.waited_s, blamed, rank=peers.rank, node=places.node)
    if problem and peers.rank == 0:
        log.warning("%s cannot be read: %s", url, problem)
    views = {one[0] for one in everyone}
    _agree_newest(f"load={url}", directory, peers, newest, views, node=places.node, calls=calls)
    return str(everyone[0][1])


_NOTHING = (-1, "")


def _find_newest(directory: GlobalDirectory) -> tuple[int, str]:
    """Return iteration and run of the newest checkpoint in a directory. Raises: CheckpointError, OSError."""
    checkpoints = directory.checkpoints()
    for iteration in checkpoints:
        with contextlib.suppress(FileNotFoundError):  # in an object store: a save under way
            run = run_of(directory.read(f"{directory.folder(iteration)}/{MANIFEST}"), iteration)
            if run is not None:
                return iteration, run
    return max(checkpoints, default=-1), ""


def _agree_newest(
    setting: str,
    directory: GlobalDirectory,
    peers: Peers,
    mine: tuple[int, str] | None,
    views: AbstractSet[tuple[int, str] | None],
    *,
    node: str,
    calls: StorageCalls,
) -> None:
    """Wait until all nodes see the newest checkpoint that one of them sees, or a newer one: a run may be saving there.

    Args:
        mine: This rank's view; ``None`` = another rank of the node checks, or the directory cannot be read.

    Raises: as :func:`_agree_view`.

    Collective: all ranks, with the same views.
    """
    seen = sorted(view for view in views if view is not None)
    if len(seen) < 2:
        return
    iteration, run = seen[-1]

    def sees_newest() -> bool:
        try:
            found = _find_newest(directory)
        except (CheckpointError, OSError) as error:
            if is_outage(error):
                raise
            return False
        return found[0] >= iteration and run in ("", found[1])

    _agree_view(setting, directory.url, peers, None if mine is None else sees_newest, node=node, calls=calls)


def _describe_content(url: str) -> str:
    try:
        iterations = GlobalDirectory.open(url).checkpoints()
    except (CheckpointError, OSError) as error:
        if is_outage(error):
            raise
        return f"no directory ({error})"
    if not iterations:
        return "no checkpoint"
    first, last = iterations[-1], iterations[0]
    which = f"iteration {last}" if first == last else f"iterations {first} to {last}"
    return f"{count(len(iterations), 'checkpoint')} ({which})"


def _name_places(config: CheckpointConfig) -> str:
    """Describe the kinds of configured directories; their paths may differ between nodes."""
    directory = "none" if config.directory is None else "object-store" if is_remote(config.directory) else "path"
    near = "none" if config.local_directory is None else "path"
    return f"directory:{directory},local_directory:{near},load:{'none' if config.load is None else 'given'}"


def _check_same_places(kinds: Sequence[str]) -> None:
    """Check that all ranks use the same kinds of directories: others would wait for each other. Raises: ConfigError."""
    others = {kind: rank for rank, kind in reversed(list(enumerate(kinds))) if kind != kinds[0]}
    if others:
        kind, rank = min(others.items(), key=lambda one: one[1])
        raise ConfigError(
            f"the checkpoint settings of the ranks differ: rank 0 uses {kinds[0]}, rank {rank} uses {kind}; give all "
            "ranks the same directory, local_directory and load"
        )


def _evidence(seen: DirectoryContent, runs: Iterator[str]) -> RunEvidence:
    """Return a directory's evidence of its run, from its content and the runs that its manifests name."""
    owner = find_owner(seen.hint, runs)
    verified = owner.run if owner is not None and owner.is_verified else None
    return RunEvidence(seen.hint, verified, max(seen.checkpoints, default=0))


def _name_nodes(everyone: list[_RankView], *, by_folder: bool) -> tuple[str, ...]:
    """Return each rank's node; two machines of one name that do not share a folder get different names."""
    if not by_folder:
        return tuple(one.node for one in everyone)
    firsts: dict[str, int] = {}
    names = []
    for rank, one in enumerate(everyone):
        # An unwritable folder shows nothing; only the node's name remains.
        first = min(one.ranks) if one.ranks else firsts.get(one.node, rank)
        same = firsts.setdefault(one.node, first) == first
        names.append(one.node if same else f"{one.node}.{first}")
    return tuple(names)


def _check_one_folder_per_node(everyone: Sequence[_RankView], leaders: Sequence[int]) -> None:
    """Check that the ranks of a node share a folder: its writer stores replicas in only one.

    Raises:
        ConfigError: They use several.
    """
    firsts: dict[tuple[str, int], int] = {}
    for rank in leaders:
        first = firsts.setdefault((everyone[rank].host, everyone[rank].port), rank)
        if first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} are both on node {everyone[rank].node}, but do not share a local_directory; "
                "a node stores replicas in one folder: give all of its ranks the same, or set replication=false"
            )


def _replication_key(config: CheckpointConfig, offers: Sequence[str]) -> bytes:
    """Return the key of the port for copies. Raises: ConfigError, when its file is unusable, or run keys differ."""
    if (path := config.replication_key_file) is None:
        keys = [accept_offer(offer, "replica port") for offer in offers]  # of all ranks: if one differs, all refuse
        return keys[0]
    try:
        key = read_file(path, max_bytes=_MAX_KEY_BYTES, follows_links=True).strip()
    except OSError as error:
        raise ConfigError(f"replication_key_file={path!r} cannot be read ({error.strerror})") from None
    if len(key) < 16:
        raise ConfigError(f"replication_key_file={path!r} holds {len(key)} bytes; give at least 16 random ones")
    return key


def home_digest(config: CheckpointConfig) -> str:
    """Return a digest of the directories, different for sessions of one process with others; rank 0's counts."""
    return hashlib.sha256(f"{config.directory}\0{config.local_directory}".encode()).hexdigest()[:16]


def _write_probe(path: Path) -> None:
    """Write and sync enough bytes to detect a full disk. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            file.truncate(0)
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk an empty file shows which ranks see the same folder
            path.touch()
        raise


def _raise(error: str) -> None:
    if error:
        raise Unavailable(f"the checkpoint directory cannot be used: {error}")


class Claims:
    """This rank's claims: to its node's folder if it leads the node, and on rank 0 to the global tier.

    Args:
        config: ``resume_from_other_run`` allows the checkpoints of another run.
    """

    def __init__(self, config: CheckpointConfig, place: WorkerEnv, places: Places, refusal: Refusal) -> None:
        own = _describe_run(place, places.run)
        may_resume_other = config.resume_from_other_run or place.resumes_other

        def claim(
            directory: Directory | GlobalDirectory | None, seen: DirectoryContent | None, *, leads: bool
        ) -> Claim | None:
            if directory is None or not leads:
                return None
            return Claim(
                directory,
                places.run,
                seen,
                own,
                may_resume_other=may_resume_other,
                refusal=refusal,
                token=places.token,
            )

        self.near = claim(places.local, places.seen_local, leads=places.is_leader(place.global_rank))
        self.far = claim(places.directory, places.seen_global, leads=place.global_rank == 0)
        self._calls = storage_calls(config, rank=place.global_rank, node=places.node)
        self._is_node_reachable = places.local_error is None
        self._is_far_reachable = places.global_error is None

    def acquire(self, *, again: bool = False) -> DirectoryRefused | None:
        """Take the leases on this rank's directories; return the reason of a refusal.

        A directory that cannot be written to can still be loaded from; its saves will fail with that error.

        Blocks: to find out whether an owner on another machine is alive: 10 s, 50 s in an object store; up
            to ``response_timeout`` longer for each directory that does not respond.
        """
        for claim, is_reachable in ((self.near, self._is_node_reachable), (self.far, self._is_far_reachable)):
            if claim is None or not (again or is_reachable):
                continue
            try:
                self._calls.run(claim.url, claim.acquire, operation="take the lease", progress=claim.progress)
            except DirectoryRefused as error:
                return error
            except (CheckpointError, OSError) as error:
                log.log(
                    logging.WARNING if is_outage(error) else logging.DEBUG,
                    "the lease on a directory cannot be taken yet: %s",
                    error,
                )
        return None

    def release(self, *, is_idle: bool) -> None:
        """Release the leases. Idempotent. Blocks: up to 2 s for each directory that does not respond."""
        for claim in (self.near, self.far):
            if claim is not None:
                claim.release(is_idle=is_idle)


def _describe_run(place: WorkerEnv, series: str) -> LeaseOwner:
    has_job = place.launcher in ("outlast", "ray")
    return LeaseOwner(
        token="",
        process=this_process(),
        run=place.run_id,
        run_dir=place.run_dir,
        series=series,
        names=place.names,
        script=None if place.launcher == "ray" else this_program(),
        job=f"{place.run_id} {place.job} {place.run_dir}" if has_job else None,
        stage=(place.cycle, place.call),
        allocation=place.allocation,
        requeues=place.requeues,
        outlives=place.replaces_dead_ranks,
    )


def plan_replication(
    config: CheckpointConfig, nodes: Sequence[str], targets: Mapping[str, Target], rank: int
) -> Replication:
    timeout_s = config.replication_timeout
    if not targets:
        return Replication(timeout_s=timeout_s)
    if not config.replication_parity:
        partners = choose_partners(nodes, factor=config.replication_factor, jump=config.replication_jump)[rank]
        return Replication(targets=tuple(targets[nodes[partner]] for partner in partners), timeout_s=timeout_s)
    members = holders_of(group_of(nodes, config.replication_parity, rank), rank)
    holders = tuple(Holder(member, targets[nodes[member]]) for member in members)
    return Replication(holders=holders, parity=config.replication_parity, timeout_s=timeout_s)


def group_of(nodes: Sequence[str], parity: int, rank: int) -> tuple[int, ...]:
    """Return the ranks that share parities with a rank, including itself."""
    return next(group for group in parity_groups(nodes, parity) if rank in group)


def warn_of_copies(config: CheckpointConfig, places: Places) -> None:
    """Log why there are fewer copies than configured, or others. On rank 0."""
    if config.non_persistent_local_ckpt_algo == "fully_parallel" and places.local is not None:
        log.info(
            "non_persistent_local_ckpt_algo=fully_parallel is treated as atomic: each rank's local file contains "
            "the complete state of that rank, so that a lost node does not cost other ranks their state"
        )
    if config.replication is False or (places.local is None and not places.memory):
        return
    if len(places.leaders) == 1:
        log.debug("one node: nothing is copied to other nodes")
    elif config.replication_factor > len(places.leaders):
        log.warning(
            "replication_factor=%d is more than the number of nodes: each shard has %d copies",
            config.replication_factor,
            len(places.leaders),
        )


@dataclass(slots=True)
class Committed:
    tiers: dict[int, set[Tier]] = field(default_factory=dict)
    held: dict[int, set[Tier]] = field(default_factory=dict)
    """For checkpoints from before these processes: tiers in which every rank has a copy of its part."""
    not_finite: set[int] = field(default_factory=set)

    def missing(self, iteration: int, wanted: frozenset[Tier]) -> frozenset[Tier]:
        return wanted - self.tiers.get(iteration, set())

    def add(self, iteration: int, tiers: frozenset[Tier]) -> None:
        self.tiers.setdefault(iteration, set()).update(tiers)

    def checkpoints(self, tier: Tier) -> set[int]:
        return {checkpoint for checkpoint, tiers in self.tiers.items() if tier in tiers}

    def note_finite(self, iteration: int, *, finite: bool) -> None:
        (self.not_finite.discard if finite else self.not_finite.add)(iteration)

    def copy(self) -> Committed:
        tiers = {checkpoint: set(tiers) for checkpoint, tiers in self.tiers.items()}
        return Committed(tiers=tiers, held=self.held, not_finite=set(self.not_finite))
