"""Ranks that save to the global tier: one lane per rank, in threads of one process, which also does the writer's
work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch.distributed import HashStore

from outlast.checkpoint.arena import Arena, Stager
from outlast.checkpoint.dcp.assemble import Assemble, Assembled, assemble
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.global_lane import GlobalLane
from outlast.checkpoint.directory import Claim, DirectoryContent, Refusal, SaveAttempt
from outlast.checkpoint.late_tiers import LateTiers
from outlast.checkpoint.manifest import topology_digest
from outlast.checkpoint.places import Committed, Places, Replication
from outlast.checkpoint.save import Save, SaveHandle
from outlast.checkpoint.shard import Identity
from outlast.checkpoint.state import FlatState, flatten
from outlast.errors import CheckpointError
from outlast.policy.checkpoint_plan import RetentionRules
from outlast.policy.lease import LeaseOwner
from outlast.policy.recovery_point import Tier
from outlast.runtime.processes import this_process

LONG_S = 60.0


@dataclass
class Image:
    """The image of a shard."""

    arena: Arena
    num_bytes: int
    tensors: tuple[Any, ...]

    @property
    def view(self) -> memoryview:
        return memoryview(self.arena.array)[: self.num_bytes]  # type: ignore[arg-type]


def stage(flat: FlatState, *, rank: int = 0, world: int = 1, iteration: int = 0, attempt: str = "a") -> Image:
    """Make the image of a rank's shard."""
    identity = Identity(
        run="r", topology=topology_digest(world), rank=rank, world_size=world, iteration=iteration, attempt=attempt
    )
    stager = Stager()

    def provide(num_bytes: int) -> Arena:
        fd = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        return Arena(fd)

    try:
        staged = stager.stage(flat, identity, provide)
        return Image(staged.arena, staged.num_bytes, tuple(staged.tensors))
    finally:
        stager.close()


class InlineWriter:
    """A writer that writes the files in the calling thread, without a writer process.

    Args:
        write: Writes a file of the global tier.
    """

    def __init__(self, write: Callable[[Assemble], Assembled]) -> None:
        self._write = write

    def ask(self, request: Assemble, reply: type[Assembled], *, timeout_s: float, fd: int) -> tuple[Assembled, None]:
        return self._write(request), None


class RecordedOutcomes:
    """Outcomes of saves, reported to the test instead of a manager.

    Args:
        report: Called with each outcome of a save: ``None`` = the save is committed.
    """

    is_call_left = False

    def __init__(self, report: Callable[[Save, CheckpointError | None], object]) -> None:
        self._report, self.late = report, LateTiers()

    def report_committed(self, iteration: int, tiers: frozenset[Tier]) -> None:
        """No launcher is notified."""

    def committed(self, save: Save, lane: str, tiers: frozenset[Tier], failures: object = ()) -> None:
        assert tiers <= {Tier.GLOBAL}
        self._report(save, None)

    def failed(self, save: Save, lane: str, error: CheckpointError, *, is_retried: bool = False) -> None:
        self._report(save, error)


class _Unleased(Claim):
    """A claim without a lease."""

    def acquire(self) -> None:
        """No other owner exists."""

    def retire(self, iterations: Sequence[int]) -> None:
        for iteration in iterations:
            self._place.remove(iteration)


def make_claim(directory: GlobalDirectory, run: str, token: str, machine: str | None) -> Claim:
    """Make the claim of a run; with a lease if a machine is given."""
    process = this_process() if machine is None else msgspec.structs.replace(this_process(), machine=machine)
    own = LeaseOwner(token="", process=process, run=run)
    kind = _Unleased if machine is None else Claim
    return kind(directory, run, DirectoryContent(), own, may_resume_other=False, refusal=Refusal(), token=token)


def open_lane(
    directory: GlobalDirectory,
    store: Any,
    *,
    rank: int,
    world: int,
    token: str,
    write: Callable[[Assemble], Assembled],
    report: Callable[[Save, CheckpointError | None], object],
    rules: RetentionRules,
    run: str = "r",
    timeout_s: float = LONG_S,
    file_bytes: int = 1 << 20,
    claim: Claim | None = None,
) -> GlobalLane:
    """Open the lane of one rank."""
    places = Places(
        directory=directory,
        local=None,
        memory=False,
        token=token,
        run=run,
        home="",
        node="node",
        nodes=("node",) * world,
        leaders=(0,),
        targets={},
        checkpoints=frozenset(),
        global_error=None,
        replication=Replication(),
        seen_local=None,
        seen_global=DirectoryContent(),
    )
    lane = GlobalLane(
        places,
        rank=rank,
        store=store,
        writer=InlineWriter(write),  # type: ignore[arg-type]
        timeout_s=timeout_s,
        claim=(claim or make_claim(directory, run, token, None)) if rank == 0 else None,
        retention=rules,
        outcomes=RecordedOutcomes(report),  # type: ignore[arg-type]
    )
    lane.file_bytes = file_bytes
    return lane


def staged_save(image: Image, iteration: int, attempt: SaveAttempt, *, suspect: bool = False) -> Save:
    """Return a save that is ready for the global tier."""
    return Save(
        iteration=iteration,
        attempt=attempt,
        handle=SaveHandle(iteration, limit_s=LONG_S),
        started_ns=0,
        stall_s=0.0,
        tiers=frozenset({Tier.GLOBAL}),
        suspect=suspect,
        arena=image.arena,
        num_bytes=image.num_bytes,
        tensors=image.tensors,
    )


def flat_state(state: Any, random: Any = None) -> FlatState:
    """Flatten a state as the manager does."""
    return flatten({"state": state, "random": random})


@dataclass
class Lanes:
    """One lane per rank, all over one directory."""

    url: str
    world: int
    token: str = "ab12cd34"
    cycle: int = 0
    timeout_s: float = LONG_S
    most_recent_k: int = 3
    retain_interval: int = 0
    suspect_window: int = 0
    file_bytes: int = 1 << 20
    writer: Callable[[int, Assemble, memoryview], Assembled] | None = None
    """Called instead of ``assemble`` with the rank, the request and the image."""
    ordinal: int = 0
    run: str = "r"
    retry_s: float = 600.0
    """Delay before a failed save is tried again; the default is longer than every test."""
    leased: str | None = None
    """A machine: rank 0 has a lease on the directory, as a process of that machine."""
    on_outcome: Callable[[int, Save, CheckpointError | None], object] | None = None
    """Called with rank, save and error of each outcome, those of retries included."""
    lanes: list[GlobalLane] = field(default_factory=list)
    store_of: Callable[[int], Any] | None = None
    """Returns a rank's view of the HashStore of all ranks; ``None`` = the HashStore itself."""
    committed: Committed = field(default_factory=Committed)
    """The commits that the ranks know of when they resume."""

    def __post_init__(self) -> None:
        store = HashStore()
        self.directory = GlobalDirectory.open(self.url)
        self.claim = make_claim(self.directory, self.run, self.token, self.leased)
        self._images: dict[int, Image] = {}
        self._arenas: list[Arena] = []
        self._outcomes: dict[int, CheckpointError | None] = {}
        self._reported: set[tuple[int, int]] = set()
        self._reports = threading.Semaphore(0)
        self.lanes = [
            open_lane(
                self.directory,
                store if self.store_of is None else self.store_of(rank),
                rank=rank,
                world=self.world,
                token=self.token,
                run=self.run,
                write=lambda request, rank=rank: self._assemble(rank, request),
                report=lambda save, error, rank=rank: self._report(rank, save, error),
                rules=RetentionRules(
                    most_recent_k=self.most_recent_k,
                    retain_interval=self.retain_interval,
                    suspect_window=self.suspect_window,
                ),
                timeout_s=self.timeout_s,
                file_bytes=self.file_bytes,
                claim=self.claim,
            )
            for rank in range(self.world)
        ]
        for lane in self.lanes:
            lane.retry_s = self.retry_s

    def save(
        self, flats: Sequence[FlatState], iteration: int, *, suspect: bool = False, leave_out: Sequence[int] = ()
    ) -> list[CheckpointError | None]:
        """Save on all ranks but those of ``leave_out``; return each rank's error."""
        ordinal, self.ordinal, self._outcomes = self.ordinal, self.ordinal + 1, {}
        saves = self.submit(
            {rank: flat for rank, flat in enumerate(flats) if rank not in leave_out},
            iteration,
            ordinal=ordinal,
            suspect=suspect,
        )
        self.wait(len(saves))
        errors = [self._outcomes[rank] for rank in saves]
        if not suspect and not any(errors):
            self.committed.add(iteration, frozenset({Tier.GLOBAL}))
        return errors

    def submit(
        self, flats: Mapping[int, FlatState], iteration: int, *, ordinal: int, suspect: bool = False
    ) -> dict[int, Save]:
        """Submit a save on some ranks; return the saves."""
        attempt = SaveAttempt(job="job", cycle=self.cycle, token=self.token, ordinal=ordinal)
        saves = {}
        for rank, flat in flats.items():
            image = stage(flat, rank=rank, world=self.world, iteration=iteration, attempt=str(attempt))
            self._images[rank] = image  # queued saves are written with it: all images of a rank have one layout
            self._arenas.append(image.arena)
            saves[rank] = staged_save(image, iteration, attempt, suspect=suspect)
        for rank, save in saves.items():
            self.lanes[rank].submit(save)
        return saves

    def wait(self, num_outcomes: int) -> None:
        """Wait for the first outcomes of so many saves."""
        for _ in range(num_outcomes):
            assert self._reports.acquire(timeout=4 * LONG_S), "a lane has reported no outcome"

    def resume(self, iterations: Iterable[int]) -> None:
        """Have the lanes count iterations as committed, as ranks do that resume."""
        for iteration in iterations:
            self.committed.add(iteration, frozenset({Tier.GLOBAL}))
        for lane in self.lanes:
            lane.start_from(self.committed)

    def forget_commit(self, iteration: int) -> None:
        """Have the lanes count an iteration as not committed, as ranks do that have resumed from an older one."""
        self.committed.tiers.pop(iteration, None)
        self.resume(())

    def close(self) -> None:
        for lane in self.lanes:
            assert lane.stop(5.0)
        for arena in self._arenas:
            arena.close()
        self.claim.release(is_idle=True)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _assemble(self, rank: int, request: Assemble) -> Assembled:
        view = self._images[rank].view
        return assemble(request, view) if self.writer is None else self.writer(rank, request, view)

    def _report(self, rank: int, save: Save, error: CheckpointError | None) -> None:
        if self.on_outcome is not None:
            self.on_outcome(rank, save, error)
        if (rank, save.attempt.ordinal) not in self._reported:  # the outcomes of retries do not count
            self._reported.add((rank, save.attempt.ordinal))
            self._outcomes[rank] = error
            self._reports.release()
