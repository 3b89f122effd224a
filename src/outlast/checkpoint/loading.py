"""Where a worker's state can come from, and in which order these places are tried."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from outlast.checkpoint.arena import ArenaPool
from outlast.checkpoint.copies import Opener
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.directory import SUSPECT, Directory
from outlast.checkpoint.kept import gather_kept
from outlast.checkpoint.load import Loaded, agree_and_prove, known_generations, not_finite_generations
from outlast.checkpoint.peers import Peers
from outlast.checkpoint.places import Places
from outlast.checkpoint.tiers import Table, gather_copies
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError
from outlast.policy.quarantine import Distrusted
from outlast.policy.recovery_point import Copy, Tier

__all__ = ["Loader"]

log = logging.getLogger(__name__)


class Loader:
    """Find and prove a generation.

    Args:
        config: Another place to load from, and timeouts.
        places: Where this run saves.
        peers: The ranks.
        writer: Who holds memory and talks to other nodes.
        arenas: Where copies from other nodes go.
        topology: Digest of the ranks' arrangement.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        places: Places,
        peers: Peers,
        writer: WriterClient,
        arenas: ArenaPool,
        *,
        topology: str,
    ) -> None:
        self._config, self._places, self._peers = config, places, peers
        self._writer, self._arenas, self._topology = writer, arenas, topology

    def newest(
        self, state: Mapping[str, Any], distrusted: Sequence[Distrusted], has: tuple[int, str] | None = None
    ) -> tuple[Loaded | None, bool]:
        """Prove the newest generation that all ranks can.

        Args:
            state: The live state, for which it must fit.
            distrusted: Copies that led to invalid results.
            has: Iteration and attempt that the live state of this rank is; ``None`` = of none.

        Returns:
            It, ``None`` if there is none at all; and whether it lies where this run saves.

        Raises:
            CheckpointError: There are generations, but none that all ranks can load, or it does not fit.
            PeerLost: A peer left.

        Collective: all ranks.
        """
        table = self._gather(self._places)
        kept = gather_kept(has, table, self._peers)
        if table.seen or self._config.load is None:
            return self._prove(table, self._places, state, distrusted, kept), True
        other = self._other_place(self._config.load)
        return self._prove(self._gather(other), other, state, distrusted), False

    def suspect(self, state: Mapping[str, Any], iteration: int, distrusted: Sequence[Distrusted]) -> Loaded | None:
        """Prove the generation of ``iteration`` that was saved for diagnosis; ``None`` when not all ranks have it.

        What is known to be committed beside it are the generations up to that iteration.

        Raises:
            CheckpointError: It does not fit the live state.
            PeerLost: A peer left.

        Collective: all ranks.
        """
        committed = self._gather(self._places)
        places = self._places
        local = Directory(places.local.path / SUSPECT) if places.local is not None else None
        directory = places.directory.suspects if places.directory is not None else None
        places = dataclasses.replace(places, directory=directory, local=local, memory=False, targets={})
        table = self._gather(places)
        table.not_finite.clear()  # that is what it was saved for
        for copies in table.copies:
            copies.intersection_update([copy for copy in copies if copy.generation == iteration])
        try:
            loaded = self._prove(table, places, state, ())
        except CheckpointError as error:
            log.warning("the state that was saved for diagnosis is unavailable: %s", error)
            return None
        if loaded is None:
            return None
        return dataclasses.replace(
            loaded,
            known=known_generations(committed, distrusted, iteration),
            not_finite=not_finite_generations(committed),
        )

    def known(self, newest: int, distrusted: Sequence[Distrusted]) -> tuple[dict[int, set[Tier]], frozenset[int]]:
        """Return what lies where this run saves.

        Returns:
            The generations up to ``newest`` that all ranks could load, with the tiers that have all of each; and the
            generations, newer ones too, that hold numbers that are infinite or NaN.

        Raises:
            PeerLost: A peer left.

        Collective: all ranks.
        """
        table = self._gather(self._places)
        return known_generations(table, distrusted, newest), not_finite_generations(table)

    def _gather(self, places: Places) -> Table:
        return gather_copies(places, self._peers, self._writer, topology=self._topology)

    def _prove(
        self,
        table: Table,
        places: Places,
        state: Mapping[str, Any],
        distrusted: Sequence[Distrusted],
        kept: Sequence[Copy | None] = (),
    ) -> Loaded | None:
        opener = Opener(
            places,
            self._peers,
            self._writer,
            self._arenas,
            topology=self._topology,
            table=table,
            state=state,
            timeout_s=self._config.replication_timeout,
            fetch_limit_s=self._config.save_timeout,
        )
        return agree_and_prove(
            table,
            places,
            self._peers,
            opener.prove,
            lambda copy: copy.check(state),
            distrusted,
            kept,
            prefer_finite=self._config.prefer_finite,
        )

    def _other_place(self, url: str) -> Places:
        """Return the places with another run's global tier, and nothing else, to load from."""
        directory = GlobalDirectory(url)
        run = ""
        if self._peers.rank == 0:
            try:
                run = directory.run() or ""
            except (CheckpointError, OSError) as error:
                log.warning("%s cannot be read: %s", url, error)
        run = self._peers.gather(run.encode())[0].decode()
        return dataclasses.replace(self._places, directory=directory, local=None, memory=False, run=run)
