"""The ranks of a run and their places: who leads a node, where all of them save, and what leaves a node with each save.

All of it is agreed once, at the start, through :class:`Peers`. What leaves a node are whole copies to partners, or
blocks for the parities of its group.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from outlast import clock
from outlast.checkpoint import protocol as f
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.store import is_remote
from outlast.checkpoint.directory import Claim, Directory, DirectoryContent, DirectoryRefused, look_at
from outlast.checkpoint.manifest import MANIFEST, decode_manifest, run_of, topology_digest
from outlast.checkpoint.replica.client import Holder, Target
from outlast.checkpoint.replica.parity import holders_of
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.decoding import from_json, read_file
from outlast.env import WorkerEnv, clean_name
from outlast.errors import CheckpointError, ConfigError, OutlastError, PeerLost, Unavailable
from outlast.policy.checkpoint_plan import choose_partners, parity_groups
from outlast.policy.lease import LeaseOwner, RunEvidence, choose_run, find_owner
from outlast.policy.recovery_point import Tier
from outlast.runtime.addresses import own_address
from outlast.runtime.process_groups import Group, find_first, gather_bytes
from outlast.runtime.processes import this_process, this_program
from outlast.runtime.run_key import accept_offer, make_offer
from outlast.wording import count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
R = TypeVar("R")
SERVE_TIMEOUT_S = 30.0
_PROBE_BYTES = 64 * 1024
_MAX_KEY_BYTES = 1 << 16
SAME_VIEW_S = 10.0
"""Seconds in which every node has to see what another node wrote to the global tier: a mount may come late."""
_LOOK_S = 0.1
MAX_NAMED = 3
"""Nodes that an error names."""


class Peers:
    """All ranks that save and load together; works alone, too.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Longest time that a gather, or a request to the ranks' store, waits.

    Collective: all ranks.
    """

    def __init__(self, rank: int, world_size: int, *, timeout_s: float) -> None:
        self.rank, self.world_size, self._timeout_s = rank, world_size, timeout_s
        self._group = Group.share(timeout_s=timeout_s) if world_size > 1 else None

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, by rank.

        Raises:
            PeerLost: A peer left, or did not come in time.

        Collective: all ranks.
        Blocks: until all ranks have come.
        """
        return [data] if self._group is None else self._exchange(gather_bytes, data)

    def find_first(self, text: str) -> str:
        """Return, on all ranks, what the lowest rank gave that gave anything; nothing if none did.

        Raises:
            PeerLost: A peer left, or did not come in time.

        Collective: all ranks.
        Blocks: until all ranks have come.
        """
        return text if self._group is None else self._exchange(find_first, text.encode()).decode()

    def _exchange(self, exchange: Callable[[ProcessGroup, bytes], R], data: bytes) -> R:
        assert self._group is not None
        try:
            found = exchange(self._group.open_group, data)
        except RuntimeError as error:
            raise PeerLost(
                f"a peer left while the ranks agreed on a checkpoint ({error}); see the log of the rank that left"
            ) from error
        if self._group is None or self._group.is_cut:
            raise PeerLost("this rank left while the ranks agreed on a checkpoint; its log says why")
        return found

    def store(self) -> Any:
        """Return a connection of its own to the ranks' store, for one thread."""
        from torch.distributed import HashStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        if self._group is None:
            return HashStore()
        default: Any = _get_default_store()
        store = default.clone()
        store.set_timeout(datetime.timedelta(seconds=self._timeout_s))
        return store

    def close(self) -> None:
        """Leave, without waiting for anyone. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def cut(self) -> None:
        """Fail whatever waits for a peer. Thread: any."""
        if self._group is not None:
            self._group.cut()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Who takes what of one rank's shard."""

    targets: tuple[Target, ...] = ()
    """Writers that take a whole copy."""
    holders: tuple[Holder, ...] = ()
    """Members of the rank's parity group, each of which takes a block."""
    parity: int = 0
    """Nodes whose shards share one parity; 0 = copies, or nothing."""
    timeout_s: float = 10.0
    """Seconds without progress after which another node is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where this rank saves and loads, and what all ranks know alike."""

    directory: GlobalDirectory | None
    """The global tier."""
    local: Directory | None
    """This node's folder of the local tier."""
    memory: bool
    """Whether the writer keeps what it holds after this worker's death."""
    token: str
    """Random; names this set of processes."""
    run: str
    home: str
    """Names the directories that are set; what lies in memory belongs to those that were set when it was saved."""
    node: str
    """This rank's node; unique."""
    nodes: tuple[str, ...]
    """Every rank's node."""
    leaders: tuple[int, ...]
    """The lowest rank of each node."""
    targets: dict[str, Target]
    """Node to where its writer takes and gives copies; empty when nothing is replicated."""
    generations: frozenset[int]
    """Generations that some rank sees in some tier, whole or not."""
    global_error: str | None
    """Why rank 0 could not look into the global tier; ``None``: it could, or there is none."""
    replication: Replication
    """What leaves this rank's node with each save."""
    seen_local: DirectoryContent | None
    """What lay in this node's folder at the start; ``None``: there is none."""
    seen_global: DirectoryContent | None
    """What lay in the global tier then, on rank 0; ``None``: it could not be looked into, or there is none."""

    @property
    def topology(self) -> str:
        """Digest of the ranks' arrangement."""
        return topology_digest(len(self.nodes))

    @property
    def tiers(self) -> frozenset[Tier]:
        """The tiers that there are."""
        there = {
            Tier.MEMORY: self.memory,
            Tier.LOCAL: self.local is not None,
            Tier.REPLICA: bool(self.targets),
            Tier.GLOBAL: self.directory is not None,
        }
        return frozenset(tier for tier, is_there in there.items() if is_there)

    def is_leader(self, rank: int) -> bool:
        """Return whether a rank acts for its node."""
        return rank in self.leaders

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's node."""
        return tuple(other for other, node in enumerate(self.nodes) if node == self.nodes[rank])


class _RankView(msgspec.Struct, kw_only=True):
    """What one rank sees."""

    node: str
    ranks: list[int]
    """The ranks that see the same local folder."""
    near: list[RunEvidence] = []
    """Of this node's memory, and, for the lowest of these ranks, its folder."""
    far: RunEvidence | None = None
    """Of the global tier, on rank 0."""
    generations: set[int] = set()
    host: str = ""
    port: int = 0
    error: str | None = None
    global_error: str | None = None
    """Why this rank could not look into the global tier."""
    lacks_probe: bool = False
    """This node does not see the file that rank 0 has written to the global tier."""
    newest: tuple[int, str] | None = None
    """Of an object store, on the first rank of each node; see :func:`_find_newest`."""


def agree_places(config: CheckpointConfig, place: WorkerEnv, peers: Peers, writer: WriterClient) -> Places:
    """Make the folders, find out which ranks share a node, and have the writers know each other.

    Raises:
        CheckpointError: A rank cannot use its folder.
        ConfigError: ``replication`` is asked for where nothing can hold a copy.
        PeerLost: A peer left.

    Collective: all ranks.
    """
    directory = GlobalDirectory.open(config.directory) if config.directory is not None else None
    local = None
    if config.local_directory is not None:
        local = Directory(Path(config.local_directory) / clean_name(place.node))
    can_hold = local is not None or writer.outlives_worker
    offered = f"{secrets.token_hex(4)} {make_offer()} {home_digest(config)} {_name_places(config)}"
    drawn = [data.decode().split(" ") for data in peers.gather(offered.encode())]
    _check_same_places([kinds for _, _, _, kinds in drawn])
    if config.replication and not can_hold:
        raise ConfigError(
            "replication=true, but nothing outlives a worker here: set local_directory, or start with outlast run"
        )
    (token, _, home, _), secret = drawn[0], _replication_key(config, [offer for _, offer, _, _ in drawn])
    probe = local.path / f".probe-{token}-{peers.rank}" if local is not None else None
    shared = Path(directory.url) / f".probe-{token}" if directory is not None and not directory.is_remote else None
    replicates = config.replication is not False and can_hold and peers.world_size > 1
    problem, global_error = "", None
    try:
        try:
            if local is not None and probe is not None:
                _write_probe(probe)
        except OSError as error:
            problem = f"local_directory={config.local_directory}: {error.strerror or error}"
        try:
            if shared is not None and peers.rank == 0:
                _write_probe(shared)
        except OSError as error:
            global_error = str(error)
        _raise(peers.find_first(problem))
        key = secret if replicates else None
        seen, seen_local, seen_global = _look(directory, local, token, home, place, peers, writer, key, global_error)
        seen.lacks_probe = shared is not None and place.local_rank == 0 and not os.path.exists(shared)
        everyone = [from_json(data, _RankView) for data in peers.gather(msgspec.json.encode(seen))]
        if shared is not None and everyone[0].global_error is None and any(one.lacks_probe for one in everyone):
            looks = partial(os.path.exists, shared) if place.local_rank == 0 else None
            _agree_view(f"directory={config.directory}", os.fspath(shared.parent), peers, looks, node=place.node)
        if directory is not None and directory.is_remote:
            views = {one.newest for one in everyone}
            _agree_newest(f"directory={config.directory}", directory, peers, seen.newest, views, node=place.node)
    finally:
        for path in (probe, shared if peers.rank == 0 else None):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
    _raise(next((one.error for one in everyone if one.error), ""))
    nodes = _name_nodes(everyone, by_folder=local is not None)
    leaders = tuple(_firsts(nodes))
    targets = {}
    if replicates and len(leaders) > 1:
        targets = {
            nodes[rank]: Target(node=nodes[rank], host=everyone[rank].host, port=everyone[rank].port)
            for rank in leaders
        }
    why = next((one.global_error for one in everyone if one.global_error is not None), None)
    if why is not None and place.cycle == 0 and not any(one.near for one in everyone):
        is_store = directory is not None and directory.is_remote
        remedy = "check its address and credentials" if is_store else "make it writable, or name another"
        raise Unavailable(f"directory={config.directory} cannot be used: {why}; {remedy}")
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
        generations=frozenset(generation for one in everyone for generation in one.generations),
        global_error=everyone[0].global_error,
        replication=plan_replication(config, nodes, targets, peers.rank),
        seen_local=seen_local,
        seen_global=seen_global,
    )


def _look(
    directory: GlobalDirectory | None,
    local: Directory | None,
    token: str,
    home: str,
    place: WorkerEnv,
    peers: Peers,
    writer: WriterClient,
    secret: bytes | None,
    global_error: str | None,
) -> tuple[_RankView, DirectoryContent | None, DirectoryContent | None]:
    """Return what all ranks have to know of what this one sees, and what lies in the local and the global tier."""
    view = _RankView(node=place.node, ranks=[peers.rank], global_error=global_error)
    seen_local, seen_global = None, None
    if directory is not None and peers.rank == 0 and global_error is None:
        try:
            looked = look_at(directory)
            view.far = _evidence(looked, directory.named_runs())
            view.generations.update(looked.generations)
            seen_global = looked
        except (CheckpointError, OSError) as error:
            view.global_error = str(error)
    try:
        if directory is not None and directory.is_remote and place.local_rank == 0 and view.global_error is None:
            view.newest = _find_newest(directory)
    except (CheckpointError, OSError) as error:
        view.global_error = f"node {place.node}: {error}"
    try:
        if local is not None:
            prefix = f".probe-{token}-"
            view.ranks = sorted(int(n.removeprefix(prefix)) for n in os.listdir(local.path) if n.startswith(prefix))
            seen_local = look_at(local)
            view.generations.update(seen_local.generations)
            if peers.rank == min(view.ranks):
                view.near.append(_evidence(seen_local, local.named_runs()))
        if writer.outlives_worker:
            held, _ = writer.ask(f.List(), f.Listed, timeout_s=SERVE_TIMEOUT_S)
            manifests = [found for one in held.generations if (found := decode_manifest(one.manifest)[0]).home == home]
            view.generations.update(manifest.iteration for manifest in manifests)
            view.near += [RunEvidence(None, manifest.run, manifest.iteration) for manifest in manifests[-1:]]
        if secret is not None:
            view.host = own_address(place.master_addr)
            request = f.Serve(host=view.host, secret=secret, folder=None if local is None else local.url)
            view.port = writer.ask(request, f.Serving, timeout_s=SERVE_TIMEOUT_S)[0].port
    except (OSError, OutlastError) as error:
        view.error = f"rank {peers.rank}: {error}"  # which ends the start on all ranks
    return view, seen_local, seen_global


def _agree_view(setting: str, url: str, peers: Peers, sees: Callable[[], bool] | None, *, node: str) -> None:
    """Wait until all nodes see the same directory.

    A mount that is missing on one node leaves an empty directory there. If rank 0 saw that one, training would begin
    again from the start next to the checkpoints that the other nodes see; if another rank did, no save would succeed.

    Args:
        setting: Names the directory, for people.
        url: The directory.
        peers: The ranks.
        sees: Returns whether this node sees what another node sees there; ``None`` = another rank of the node does.
        node: This node.

    Raises:
        ConfigError: A node has another directory of that name.
        PeerLost: A peer left.

    Collective: all ranks.
    Blocks: up to :data:`SAME_VIEW_S`, plus the time of a look into the directory.
    """
    end_ns, view = clock.now_ns() + int(SAME_VIEW_S * 1e9), ("", True)
    if sees is not None:
        while not (is_same := sees()) and clock.now_ns() < end_ns:
            time.sleep(_LOOK_S)
        view = f"node {node} sees {_describe_content(url)} in {url}", is_same
    views = [from_json(data, tuple[str, bool]) for data in peers.gather(msgspec.json.encode(view))]
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


def agree_source(url: str, directory: GlobalDirectory, places: Places, peers: Peers) -> None:
    """Check that a directory that this run only loads from holds the same checkpoints on all nodes.

    Raises:
        ConfigError: Some nodes see another newest checkpoint there, or none.
        PeerLost: A peer left.

    Collective: all ranks.
    Blocks: up to :data:`SAME_VIEW_S` where the nodes differ.
    """
    newest = None
    if places.is_leader(peers.rank):
        try:
            newest = _find_newest(directory)
        except (CheckpointError, OSError):
            newest = _NOTHING
    views = {from_json(data, tuple[int, str] | None) for data in peers.gather(msgspec.json.encode(newest))}
    _agree_newest(f"load={url}", directory, peers, newest, views, node=places.node)


_NOTHING = (-1, "")


def _find_newest(directory: GlobalDirectory) -> tuple[int, str]:
    """Return the newest checkpoint in a directory: its iteration, and the run that saved it.

    Raises:
        CheckpointError: An object store cannot be read.
        OSError: A folder cannot be read.
    """
    generations = directory.generations()
    for iteration in generations:
        with contextlib.suppress(FileNotFoundError):  # in an object store: a save that is under way
            run = run_of(directory.read(f"{directory.folder(iteration)}/{MANIFEST}"), iteration)
            if run is not None:
                return iteration, run
    return max(generations, default=-1), ""


def _agree_newest(
    setting: str,
    directory: GlobalDirectory,
    peers: Peers,
    mine: tuple[int, str] | None,
    views: AbstractSet[tuple[int, str] | None],
    *,
    node: str,
) -> None:
    """Wait until all nodes see the newest checkpoint that one of them sees, or a newer one: a run may be saving there.

    Args:
        setting: Names the directory, for people.
        directory: The directory.
        peers: The ranks.
        mine: What this rank sees; ``None`` = another rank of the node looks, or the directory cannot be read.
        views: What all ranks see.
        node: This node.

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
        except (CheckpointError, OSError):
            return False
        return found[0] >= iteration and run in ("", found[1])

    _agree_view(setting, directory.url, peers, None if mine is None else sees_newest, node=node)


def _describe_content(url: str) -> str:
    """Return which checkpoints a node sees in a directory, for people."""
    try:
        iterations = GlobalDirectory.open(url).generations()
    except (CheckpointError, OSError) as error:
        return f"no directory ({error})"
    if not iterations:
        return "no checkpoint"
    first, last = iterations[-1], iterations[0]
    which = f"iteration {last}" if first == last else f"iterations {first} to {last}"
    return f"{count(len(iterations), 'checkpoint')} ({which})"


def _name_places(config: CheckpointConfig) -> str:
    """Return which kinds of places a rank is told to use; their names may differ between nodes."""
    directory = "none" if config.directory is None else "object-store" if is_remote(config.directory) else "path"
    near = "none" if config.local_directory is None else "path"
    return f"directory:{directory},local_directory:{near},load:{'none' if config.load is None else 'given'}"


def _check_same_places(kinds: Sequence[str]) -> None:
    """Check that no rank saves or loads where others do not: they would wait for each other.

    Raises:
        ConfigError: The settings of the ranks differ.
    """
    others = {kind: rank for rank, kind in reversed(list(enumerate(kinds))) if kind != kinds[0]}
    if others:
        kind, rank = min(others.items(), key=lambda one: one[1])
        raise ConfigError(
            f"the checkpoint settings of the ranks differ: rank 0 uses {kinds[0]}, rank {rank} uses {kind}; give all "
            "ranks the same directory, local_directory and load"
        )


def _evidence(seen: DirectoryContent, runs: Iterator[str]) -> RunEvidence:
    """Return what a place shows of its run, from what was seen there and the runs that its manifests name."""
    owner = find_owner(seen.hint, runs)
    proven = owner.run if owner is not None and owner.is_proven else None
    return RunEvidence(seen.hint, proven, max(seen.generations, default=0))


def _name_nodes(everyone: list[_RankView], *, by_folder: bool) -> tuple[str, ...]:
    """Return each rank's node; two machines of one name that do not share a folder are distinguished."""
    if not by_folder:
        return tuple(one.node for one in everyone)
    firsts: dict[str, int] = {}
    names = []
    for one in everyone:
        first = min(one.ranks)
        same = firsts.setdefault(one.node, first) == first
        names.append(one.node if same else f"{one.node}.{first}")
    return tuple(names)


def _replication_key(config: CheckpointConfig, offers: Sequence[str]) -> bytes:
    """Return the key of the port at which copies are taken, from what all ranks offer.

    Raises:
        ConfigError: The file that is to hold it cannot be used, or the ranks have different run keys.
    """
    if config.replication_key_file is not None:
        return _read_key(config.replication_key_file)
    keys = [accept_offer(offer, "replica port") for offer in offers]  # of all ranks: where one differs, all refuse
    return keys[0]


def home_digest(config: CheckpointConfig) -> str:
    """Return what two sessions of one process, with other directories each, do not share; rank 0's counts."""
    return hashlib.sha256(f"{config.directory}\0{config.local_directory}".encode()).hexdigest()[:16]


def _firsts(nodes: Sequence[str]) -> Iterator[int]:
    """Yield the lowest rank of each node."""
    seen = set[str]()
    for rank, node in enumerate(nodes):
        if node not in seen:
            seen.add(node)
            yield rank


def _read_key(path: str) -> bytes:
    try:
        key = read_file(path, max_bytes=_MAX_KEY_BYTES, follows_links=True).strip()
    except OSError as error:
        raise ConfigError(f"replication_key_file={path!r} cannot be read ({error.strerror})") from None
    if len(key) < 16:
        raise ConfigError(f"replication_key_file={path!r} holds {len(key)} bytes; give at least 16 random ones")
    return key


def _write_probe(path: Path) -> None:
    """Write and sync as much as a disk that is full has no room for.

    Raises:
        OSError: The folder cannot be written, or its disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            file.truncate(0)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _raise(error: str) -> None:
    if error:
        raise Unavailable(f"the checkpoint directory cannot be used: {error}")


class Claims:
    """This rank's claims: to its node's folder if it leads the node, and on rank 0 to the global tier.

    Args:
        config: Whether another run's generations may be resumed from.
        place: This rank's place.
        places: Where the ranks save.
        on_lost: Called in a thread of a lease's, when a directory was taken over.
    """

    def __init__(
        self, config: CheckpointConfig, place: WorkerEnv, places: Places, *, on_lost: Callable[[DirectoryRefused], None]
    ) -> None:
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
                on_lost=on_lost,
                token=places.token,
            )

        self.near = claim(places.local, places.seen_local, leads=places.is_leader(place.global_rank))
        """To this node's folder."""
        self.far = claim(places.directory, places.seen_global, leads=place.global_rank == 0)
        """To the global tier."""
        self._is_far_reachable = places.global_error is None

    def acquire(self) -> DirectoryRefused | None:
        """Take the leases on this rank's directories; return why that is refused.

        One that cannot be written to may be loaded from all the same: its saves are going to fail with that error.

        Blocks: where only time can tell whether an owner on another machine lives: 10 s, 50 s in an object store.
        """
        for claim, is_reachable in ((self.near, True), (self.far, self._is_far_reachable)):
            try:
                if claim is not None and is_reachable:
                    claim.acquire()
            except DirectoryRefused as error:
                return error
            except (CheckpointError, OSError) as error:
                log.debug("a directory cannot be taken yet: %s", error)
        return None

    def release(self, *, is_idle: bool) -> None:
        """Release the leases. Idempotent. Blocks: up to 2 s for each directory that does not answer."""
        for claim in (self.near, self.far):
            if claim is not None:
                claim.release(is_idle=is_idle)


def _describe_run(place: WorkerEnv, series: str) -> LeaseOwner:
    """Return how a worker's run describes itself in the record of a lease."""
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
        outlives=place.config_file is not None,
    )


def plan_replication(
    config: CheckpointConfig, nodes: Sequence[str], targets: Mapping[str, Target], rank: int
) -> Replication:
    """Return what leaves a rank's node; nothing where there is no other node that could take it.

    Args:
        config: How many copies, or parities.
        nodes: Every rank's node.
        targets: Node to where its writer takes copies.
        rank: This rank.
    """
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
    """Return the ranks with which a rank shares parities, itself included."""
    return next(group for group in parity_groups(nodes, parity) if rank in group)


def warn_of_copies(config: CheckpointConfig, places: Places) -> None:
    """Log why there are fewer copies than the settings suggest, or others. On rank 0."""
    if config.non_persistent_local_ckpt_algo == "fully_parallel" and places.local is not None:
        log.info(
            "non_persistent_local_ckpt_algo=fully_parallel is understood as atomic: each rank's local file holds all "
            "of its own state, so that a lost node takes no other rank's along"
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
    """Which generations are known to be committed, and which of all hold numbers that are infinite or NaN."""

    tiers: dict[int, set[Tier]] = field(default_factory=dict)
    """Each committed generation's tiers."""
    held: dict[int, set[Tier]] = field(default_factory=dict)
    """Tiers in which every rank has a copy of its part, of what was committed before these processes."""
    not_finite: set[int] = field(default_factory=set)
    """Generations that hold numbers that are infinite or NaN, committed here or newer."""

    def missing(self, iteration: int, wanted: frozenset[Tier]) -> frozenset[Tier]:
        """Return those of the tiers that an iteration is not in yet."""
        return wanted - self.tiers.get(iteration, set())

    def add(self, iteration: int, tiers: frozenset[Tier]) -> None:
        """Count an iteration as committed to these tiers, too."""
        self.tiers.setdefault(iteration, set()).update(tiers)

    def generations(self, tier: Tier) -> set[int]:
        """Return the generations that are committed to a tier."""
        return {generation for generation, tiers in self.tiers.items() if tier in tiers}

    def note_finite(self, iteration: int, *, finite: bool) -> None:
        """Note whether all numbers of a generation are finite."""
        (self.not_finite.discard if finite else self.not_finite.add)(iteration)

    def copy(self) -> Committed:
        """Return a copy that changes by itself."""
        tiers = {generation: set(tiers) for generation, tiers in self.tiers.items()}
        return Committed(tiers=tiers, held=self.held, not_finite=set(self.not_finite))
