"""What is said of invalid results: to people, to the journal, and to the node's agent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from outlast.env import WorkerEnv
from outlast.incidents import EventKind, Incident, IncidentKind, Rung, Verdict
from outlast.numerics.determinism import Differences, describe_differences
from outlast.numerics.step_facts import StepFacts
from outlast.numerics.validations import Judged, Rejected
from outlast.policy.rerun import Diagnosis, Finding, Replay
from outlast.runtime.device import device_name
from outlast.runtime.diagnoses import write_diagnosis

if TYPE_CHECKING:
    from outlast.runtime.journal import Journal

__all__ = ["Findings"]

log = logging.getLogger(__name__)


class Findings:
    """Say what was found on this rank.

    Args:
        place: This worker's place.
        journal: Where events go; ``None`` = nowhere.
    """

    def __init__(self, place: WorkerEnv, journal: Journal | None) -> None:
        self._place, self._journal = place, journal
        self.device = device_name(place.device or place.node, place.local_rank)
        """What this rank computes on."""
        self.counts: dict[Finding, int] = dict.fromkeys(Finding, 0)
        """Results of this rank by what was found of them."""

    def say_rejected(self, rejected: Rejected, iteration: int, *, is_first_run: bool) -> None:
        """Say that a result was rejected."""
        log.warning(
            "rank %d on node %s (device %s), iteration %d, validation %d: %s is %s (%s)%s",
            self._place.global_rank,
            self._place.node,
            self.device,
            iteration,
            rejected.call,
            rejected.what,
            rejected.value,
            rejected.message,
            "; all ranks run the step again" if is_first_run else "",
        )

    def say_differences(self, report: Mapping[str, Differences], iteration: int) -> None:
        """Say how much two runs of a step differed so far, by the name of what was validated."""
        log.info("differences between two runs of a step:\n%s", describe_differences(report))
        if self._journal is not None:
            rank, builtins = self._place.global_rank, msgspec.to_builtins(report)
            self._journal.write(EventKind.DETERMINISM_REPORT, rank=rank, iteration=iteration, report=builtins)

    def diagnose(
        self,
        judged: Judged,
        finding: Finding,
        *,
        iteration: int,
        batch: str,
        num_tries: int,
        max_tries: int,
        replay: Replay | None,
        facts: StepFacts | None,
    ) -> Diagnosis:
        """Return what is known of an invalid result of this rank.

        Args:
            judged: The result.
            finding: What was found of it.
            iteration: Number of optimizer steps done before the step.
            batch: Fingerprint of the step's batches.
            num_tries: Replays on the same device that were done.
            max_tries: How many there may be.
            replay: What the step replays, if it is a replay.
            facts: What was saved of the replayed step.
        """
        node, device = self._place.node, self.device
        if replay is not None and replay.rank == self._place.global_rank:
            node, device = replay.node, replay.device
        elif replay is not None and facts is not None:
            node, device = facts.node, facts.device
        return Diagnosis(
            finding=finding,
            rank=self._place.global_rank,
            node=node,
            device=device,
            iteration=iteration,
            call=judged.rejected.call,
            what=judged.rejected.what,
            message=judged.rejected.message,
            first=judged.rejected.value,
            second=judged.second,
            batch=batch,
            tries=num_tries,
            max_tries=max_tries,
            replayed_on="" if replay is None else self.device,
            rejected_ranks=(self._place.global_rank,),
        )

    def settle_here(self, diagnosis: Diagnosis) -> None:
        """Say what was found of a result that does not stop training: an incident at the ladder's lowest rung."""
        self.counts[diagnosis.finding] += 1
        log.warning("%s; training continues with the newer run", diagnosis.describe())
        reason = "the step was run again, and training continues with the newer run"
        self._write(diagnosis, verdict=Verdict(rung=Rung.RERUN_STEP, reason=reason))

    def leave(self, diagnosis: Diagnosis) -> None:
        """Say what ends this process, and leave it to the node's agent; every rank says the same."""
        place = self._place
        if diagnosis.rank == place.global_rank:
            self.counts[diagnosis.finding] += 1
            log.error("%s", diagnosis.describe())
            self._write(diagnosis)
        if place.run_dir is None:
            return
        try:
            write_diagnosis(place.run_dir, place.job, place.cycle, place.global_rank, diagnosis)
        except OSError as error:
            log.error("the diagnosis cannot be written (%s); the launcher uses the exit code alone", error)

    def _write(self, diagnosis: Diagnosis, **more: Any) -> None:
        if self._journal is None:
            return
        incident = Incident(
            kind=IncidentKind.INVALID_RESULT,
            job=self._place.job,
            cycle=self._place.cycle,
            node=self._place.node,
            rank=self._place.global_rank,
            iteration=diagnosis.iteration,
            evidence={"summary": diagnosis.describe(), "diagnosis": msgspec.to_builtins(diagnosis)},
        )
        self._journal.write(
            EventKind.INCIDENT,
            rank=self._place.global_rank,
            iteration=diagnosis.iteration,
            incident=incident,
            **more,
        )
