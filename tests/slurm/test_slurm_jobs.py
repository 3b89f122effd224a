"""Trainings on a real Slurm cluster of three nodes: shutdown requests, requeues, time limits, lost nodes and
failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, run_slurm
from slurm_jobs import Training

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def limited(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training that exceeds its time limit; started before the other tests, since Slurm counts limits in minutes.

    Slurm checks limits every 30 s: the job gets its signal 60 to 90 s after its start, and is killed 30 s later.
    """
    folder = tmp_path_factory.mktemp("limited")
    options = ["--nproc-per-node=2", "--time=2", "--preempt-time=30"]
    return Training(slurm, folder, *options, total=130, script=("--pace", "1", "0.01"))


@pytest.mark.extended
@pytest.mark.slow
def test_manually_requeued_job_resumes_and_finishes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """After `scontrol requeue` a run resumes from its checkpoint, and a finished run is not requeued."""
    training = Training(slurm, tmp_path, "--nproc-per-node=2", total=200)
    training.wait_for(0, 15)
    slurm.call("scontrol", "requeue", training.id)
    training.assert_finished_as_undisturbed()
    assert training.facts()["Restarts"] == "1", "a finished run was re-queued"
    assert training.remembered()["failures"] == 0
    assert "is not re-queued: the run is finished" in training.output()
    for rank in (0, 1):
        first, second = training.iterations(0, rank), training.iterations(1, rank)
        assert 10 <= second[0] <= first[-1] + 1, "it did not resume from the newest checkpoint"
        assert second == list(range(second[0], training.total))


@pytest.mark.campaign
def test_bad_node_is_excluded_from_the_requeued_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A faulty node is replaced by the spare; after `scancel --signal=TERM` the job is requeued without that node.

    All ranks exit after the same iteration, and the next start of the job resumes with the following one.
    """
    options = ["--nodes=1", "--spares=1", "--nproc-per-node=2"]
    script = ("--crash", "--pace", "0.3", "0.01")
    training = Training(slurm, tmp_path, *options, total=150, agent=("--ft-max-node-faults=1",), script=script)
    training.wait_for(0, 15)
    bad_node = (tmp_path / "crashed").read_text()
    slurm.call("scancel", "--signal=TERM", training.id)
    training.assert_finished_as_undisturbed()

    facts = training.facts()
    assert (facts["Restarts"], facts["ExcNodeList"]) == ("1", bad_node), training.output()
    assert training.remembered()["excluded"] == [bad_node]
    assert training.remembered()["failures"] == 0, "what the spare mended, and being told to leave, cost a retry"
    output = training.output()
    assert output.count("goes back to the queue: shutdown requested") == 1, output
    assert "is not re-queued: the run is finished" in output
    for rank in (0, 1):
        assert {one.node for one in training.ran(rank) if one.cycle == 0 and one.start == 0} == {bad_node}
        ran = [one for one in training.ran(rank) if (one.start, one.cycle) > (0, 0)]
        assert bad_node not in {one.node for one in ran}
        assert [one.iteration for one in ran] == list(range(training.total)), "it lost or repeated iterations"
    assert training.iterations(0, 0)[-1] == training.iterations(0, 1)[-1], "the ranks left at different iterations"


@pytest.mark.campaign
def test_job_resumes_after_its_time_limit(limited: Training) -> None:
    """The job's steps get a signal before the time limit: all ranks save and exit, and the requeued job resumes
    there."""
    limited.assert_finished_as_undisturbed()
    assert limited.remembered()["failures"] == 0
    output, restarts = limited.output(), int(limited.facts()["Restarts"])
    assert restarts >= 1, "the limit was not reached"
    assert output.count("goes back to the queue: shutdown requested, with a saved checkpoint") == restarts, (
        "a finished run came back"
    )
    assert "is not re-queued: the run is finished" in output
    for rank in (0, 1):
        ran = [one.iteration for one in limited.ran(rank)]
        assert ran == list(range(limited.total)), "it lost or repeated iterations"
        assert limited.iterations(0, rank) == limited.iterations(0, 0), "the ranks left at different iterations"


@pytest.mark.campaign
def test_lost_node_leads_to_one_requeue_on_other_nodes(tmp_path: Path) -> None:
    """When a node's slurmd dies, Slurm restarts the job on other nodes, where it resumes from its checkpoint.

    Slurm cannot reach the processes of that node: their agent must exit by itself, without a change to the run.
    """
    with run_slurm() as slurm:
        script = ("--pace", "0.3", "0.01")
        training = Training(slurm, tmp_path, "--nodes=2", "--nproc-per-node=1", total=300, script=script)
        training.wait_for(0, 15)
        lost = training.nodes()[1]
        slurm.kill_daemon(lost)
        training.assert_finished_as_undisturbed()
        assert training.facts()["Restarts"] == "1"
        assert lost not in training.nodes()
        slurm.wait_until(lambda: not slurm.running_on(lost), 60, lambda: str(slurm.running_on(lost)))
    for rank in (0, 1):
        assert [one.start for one in training.ran(rank)] == sorted(one.start for one in training.ran(rank))
        first, second = training.iterations(0, rank), training.iterations(1, rank)
        assert 10 <= second[0] <= first[-1] + 1, "it did not resume from the newest checkpoint"
        assert second == list(range(second[0], training.total))


@pytest.mark.extended
@pytest.mark.slow
def test_spare_takes_a_lost_nodes_slot_without_a_requeue(tmp_path: Path) -> None:
    """With a spare node in the job, the loss of a node needs no requeue: the spare takes its slot."""
    with run_slurm() as slurm:
        training = Training(slurm, tmp_path, "--nodes=2", "--spares=1", "--nproc-per-node=1", total=100)
        training.wait_for(0, 15)
        head = training.nodes()[0]  # runs the batch script, without which Slurm has no job
        lost = next(one.node for one in (training.ran(0)[0], training.ran(1)[0]) if one.node != head)
        slurm.power_off(lost)
        training.assert_finished_as_undisturbed()
        assert training.facts()["Restarts"] == "0"
    resumed = [one for one in training.ran(0) if one.cycle == 1]
    assert resumed[0].iteration >= 10, "it began anew"
    assert {one.node for rank in (0, 1) for one in training.ran(rank) if one.cycle == 1}.isdisjoint({lost})
