"""Whether this node may take part in the job, by the results of its health checks (:mod:`outlast.launch.checkups`).

Before joining: a node that fails stays outside; its agent reports the reason and exits. It stays running without a slot
if it hosts the coordinator, or with ``retry_interval``, which repeats the check. A checkpoint directory or object store
that does not respond is not such a failure: the start waits for it.

After a fault: the agent requests the next slot at once, and only the start of workers waits for the result. A node that
fails declines its slot, and the recovery policy decides; if it is given the slot again, because there is no other node,
its workers start nevertheless.

While training: a failure is reported, and the coordinator replaces the node if a spare waits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from outlast.errors import ExitReason
from outlast.health.probing import CheckResult, Status
from outlast.incidents import Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.checkups import CheckedUp, Checkups, Occasion
from outlast.runtime.event_loop import Timers

if TYPE_CHECKING:
    from outlast.launch.coordinator_client import CoordinatorClient
    from outlast.launch.node_journal import NodeJournal

log = logging.getLogger(__name__)
_OF_ARITHMETIC = ("compute", "device memory")
_OF_PLACES = ("disk", "store")
_UNREPORTED_S = 15.0
"""How long a node that stays outside tries to report the reason to the coordinator."""


def _is_of_place(result: CheckResult) -> bool:
    """Return whether a check failed because of a place that the run writes to; the clock check reads a file there."""
    return result.name in _OF_PLACES or (result.name == "clock" and result.status == Status.TIMED_OUT)


class NodeHealth:
    """Decide whether this node may take part.

    Args:
        checkups: Checks the node; closed with this object. ``None``: no health checks.
        client: Reports to the coordinator.
        journal: This node's journal.
        timers: The agent's timers.
        is_alone: The job has no other node that needs the coordinator.
        run_dir: The run directory; its disk is irrelevant once the node has joined.

    Thread: the agent's main thread.
    """

    def __init__(
        self,
        checkups: Checkups | None,
        *,
        client: CoordinatorClient,
        journal: NodeJournal,
        timers: Timers,
        is_alone: bool,
        run_dir: str = "",
    ) -> None:
        self._run_dir = run_dir
        self._checkups, self._config = checkups, checkups.config if checkups is not None else None
        self._client, self._journal, self._timers, self._is_alone = client, journal, timers, is_alone
        self._is_admitted = self._config is None or not self._config.before_joining
        """No check prevents joining; never reset."""
        self.stop: m.Stop | None = None
        """How the agent must end, as its node does not join; ``None``: it need not."""
        self.is_looking = False
        """A check after a fault runs: no worker may start."""
        self._is_connected = self._is_host = False
        self._outside: Incident | None = None
        """Why the node stays outside."""
        self._num_faults = 0
        self._is_clear = False
        """The workers from before the fault are gone."""
        self._is_asked = self._since_clear = False
        """A check after a fault runs; it began after the workers were gone."""
        self._is_reporting = False
        """The places are checked after the fault, for the log only."""
        self._unhealthy: CheckedUp | None = None
        """Failed result of the last check after a fault."""
        self._known: frozenset[tuple[str, str]] = frozenset()
        """Failures while training that were logged already."""
        if self._is_admitted:
            self._expect_next()

    @property
    def may_join(self) -> bool:
        """Whether the coordinator is reachable, and no check prevents joining."""
        return self._is_connected and self._is_admitted

    def note_connected(self, *, is_host: bool) -> None:
        """Note that the coordinator is reached; report why the node stays outside, if it does."""
        self._is_connected, self._is_host = True, is_host
        self._timers.cancel("unreported")
        if self._outside is not None:
            self._stay_outside()

    def take(self, found: CheckedUp) -> None:
        """Take the results of a health check."""
        match found.occasion:
            case Occasion.JOINING:
                self._take_before_joining(found)
            case Occasion.FAULT:
                self._take_after_fault(found)
            case Occasion.TRAINING:
                self._take_while_training(found)

    def close(self) -> None:
        if self._checkups is not None:
            self._checkups.close()

    # -- before joining ----------------------------------------------------------------------------------------

    def _take_before_joining(self, found: CheckedUp) -> None:
        self._log(found)
        if not self._prevents_joining(found):
            self._outside, self._is_admitted = None, True
            self._expect_next()
            return
        self._outside = self._incident(found)
        if self._is_connected:
            self._stay_outside()
        else:
            self._timers.set("unreported", _UNREPORTED_S, self._leave)

    def _stay_outside(self) -> None:
        assert self._outside is not None
        assert self._checkups is not None
        node, retry_s = self._client.node, self._checkups.config.retry_interval
        stays = retry_s > 0 or (self._is_host and not self._is_alone)
        self._client.send(m.Unhealthy(incident=self._outside, stays=stays))
        if retry_s > 0:
            log.warning("node %s does not join; it is checked again in %g s", node, retry_s)
            self._timers.set("retry", retry_s, self._look_before_joining)
        elif stays:
            log.warning("node %s does not join; its agent keeps running, as it hosts the coordinator", node)
        else:
            self._leave()

    def _leave(self) -> None:
        self.stop = self.stop_outside(None)

    def _look_before_joining(self) -> None:
        assert self._checkups is not None
        self._checkups.begin(Occasion.JOINING, gpus=self._checkups.config.gpus)

    def stop_outside(self, stop: m.Stop | None) -> m.Stop:
        """Return how the job ended for a node that stayed outside; ``stop``: its end for the other nodes, if known."""
        if self._outside is None and stop is not None:
            return stop  # its check has not ended
        why = self._outside.describe() if self._outside is not None else f"node {self._client.node} was not yet fit"
        code = stop.exit_code if stop is not None and stop.exit_code else ExitReason.UNHEALTHY_NODE
        end = "" if stop is None else f"; the job ended without it: {stop.reason}"
        return m.Stop(exit_code=code, reason=f"{why}; it did not join{end}")

    # -- after a fault -----------------------------------------------------------------------------------------

    def suspect(self) -> None:
        """Check the node because of a fault that began on it; called while the workers are being ended."""
        self._num_faults += 1
        if self._checkups is None or self._config is None or not self._config.after_fault:
            return
        if self._is_alone:  # no node could replace it: its workers start whatever the result
            self._checkups.begin(Occasion.TRAINING, gpus=False, computes=self._num_faults > 1)
            return
        self.is_looking, self._is_clear, self._is_asked, self._unhealthy = True, False, False, None
        if not self._with_gpus:  # dying workers still hold GPU memory
            self._look_after_fault()

    def note_cleared(self) -> None:
        """Note that the ended workers are gone."""
        self._is_clear = True
        if self.is_looking and not self._is_asked:
            self._look_after_fault()

    def refuse(self, cycle: int) -> Incident | None:
        """Return once why this node's workers must not start in a cycle; ``None``: they may."""
        unhealthy, self._unhealthy = self._unhealthy, None
        return None if unhealthy is None else self._incident(unhealthy, cycle=cycle)

    @property
    def uses_gpus(self) -> bool:
        """Whether the check after a fault uses GPU memory, or is about to."""
        return self.is_looking and self._with_gpus

    @property
    def _with_gpus(self) -> bool:
        return self._config is not None and self._config.gpus and self._num_faults > 1

    def _look_after_fault(self) -> None:
        assert self._checkups is not None
        self._is_asked, self._since_clear = True, self._is_clear
        self._checkups.begin(Occasion.FAULT, gpus=self._with_gpus, computes=self._num_faults > 1, places=False)
        if not self._is_reporting:  # separately, so that a place that hangs delays no start
            self._is_reporting = True
            self._checkups.begin(Occasion.TRAINING, gpus=False, computes=False)

    def _take_after_fault(self, found: CheckedUp) -> None:
        self._is_asked = False
        is_unhealthy = self._prevents_training(found)
        if is_unhealthy and not self._since_clear:
            # Dying workers may have held what was missing: only a check without them counts.
            if self._is_clear:
                self._look_after_fault()
            return
        self._log(found)
        if is_unhealthy:
            self._unhealthy = found
        self.is_looking = False

    # -- while training ----------------------------------------------------------------------------------------

    def _expect_next(self) -> None:
        if self._config is not None and self._config.node_interval > 0:
            self._timers.set("check-up", self._config.node_interval, self._look_while_training)

    def _look_while_training(self) -> None:
        assert self._checkups is not None
        self._checkups.begin(Occasion.TRAINING, gpus=False)

    def _take_while_training(self, found: CheckedUp) -> None:
        self._is_reporting = False
        self._expect_next()
        known, self._known = self._known, frozenset((result.name, result.target) for result in found.failed)
        if not self._known <= known:
            self._log(found)
        elif known and not self._known:
            log.info("node %s is healthy again", self._client.node)
        if self._prevents_training(found):
            self._client.send(m.Unhealthy(incident=self._incident(found), stays=True))

    def _prevents_training(self, found: CheckedUp) -> bool:
        """Return whether the workers cannot train here.

        Checkpoint directories, object stores and the run directory are irrelevant: memory and replicas hold checkpoints
        while a disk is full or hangs, and ``max_durable_lag`` is the limit.
        """
        return not all(_is_of_place(one) for one in found.failed)

    def _prevents_joining(self, found: CheckedUp) -> bool:
        """Return whether the node must stay outside.

        The start waits for a place that does not respond. One that cannot be written to counts only if it is the run
        directory, or if the node cannot write to any checkpoint directory.
        """
        tiers = {one.target for one in found.results if one.name in _OF_PLACES} - {self._run_dir}
        unusable = {one.target for one in found.failed if one.name == "disk" and one.status != Status.TIMED_OUT}
        has_no_tier = bool(unusable - {self._run_dir}) and unusable >= tiers
        return self._prevents_training(found) or self._run_dir in unusable or has_no_tier

    # -- what is reported --------------------------------------------------------------------------------------

    def _log(self, found: CheckedUp) -> None:
        is_joining = found.occasion == Occasion.JOINING
        is_refused = self._prevents_joining(found) if is_joining else self._prevents_training(found)
        what_follows = "" if is_refused else "; it joins" if is_joining else "; training continues on this node"
        for result in found.failed:
            text = result.describe() + what_follows
            log.error("node %s is unhealthy (%s): %s", self._client.node, found.occasion, text)

    def _incident(self, found: CheckedUp, *, cycle: int | None = None) -> Incident:
        failed = found.failed
        summary = "; ".join(result.describe() for result in failed)
        incident = self._journal.incident(IncidentKind.NODE_UNHEALTHY, summary, cycle=cycle)
        checks = [
            {"name": one.name, "target": one.target, "status": str(one.status), "reason": one.reason} for one in failed
        ]
        wrong = any(one.name in _OF_ARITHMETIC and one.status == Status.FAILED for one in failed)
        evidence = {**incident.evidence, "occasion": str(found.occasion), "checks": checks, "computes_wrong": wrong}
        return msgspec.structs.replace(incident, evidence=evidence)
