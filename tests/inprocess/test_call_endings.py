"""Exit code, exception and last line of each rank of a wrapped call; no rank exits with 0 without the function's
result."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.errors import ExitReason
from outlast.policy.inprocess_protocol import is_orderly_exit
from outlast.testing import Cluster
from outlast.testing.ranks import TOKEN, RankProcesses, end_processes

RANKS = Path(__file__).with_name("ending_ranks.py")
PATIENCE_S = 250
RETURNED = (0, "returned trained")
A_SPARE = (0, "returned None")
NO_SPARE = (1, r"RestartAbort: of 2 ranks 1 cannot be filled from 0 spares")
TOO_OFTEN = (1, r"UnhealthyRank: rank \d failed 1 times, more than max_rank_faults=0 allows|RestartAbort: of 2 ranks")
"""The first rank that fails; the other one may be interrupted before its failure."""
REMOVED = r"rank 0 is permanently removed: "
End = tuple[int, str]
"""Exit code of a rank, and a pattern for the last line of its output."""

ENDS: dict[str, list[End]] = {
    "returns": [RETURNED, RETURNED],
    "completion fails": [(1, "BadDevice: planned fault"), RETURNED],
    "health_check fails": [(1, "BadDevice: planned fault"), NO_SPARE],
    "finalize fails": [(1, "BadDevice: planned fault"), NO_SPARE],
    "health_check exits": [(1, r"RankLeft: a plug-in or signal handler called sys\.exit\(0\)"), NO_SPARE],
    "initialize aborts": [(1, "RestartAbort: planned abort"), (1, "RestartAbort: planned abort")],
    "fails too often everywhere": [TOO_OFTEN, TOO_OFTEN],
    "fails everywhere": [(1, "RestartAbort: all restarts are spent"), (1, "RestartAbort: all restarts are spent")],
    "exits with 3": [(3, REMOVED + "SystemExit: 3"), NO_SPARE],
    "exits with text": [(1, "text"), NO_SPARE],
    "exits with 75 everywhere": [(75, ""), (75, "")],
    "exits with 0 everywhere": [(0, ""), (0, "")],
    "is killed": [(-signal.SIGKILL, ""), NO_SPARE],
    "is interrupted": [(-signal.SIGINT, "KeyboardInterrupt"), (1, "RestartAbort: interrupted by the keyboard")],
}
"""With two active ranks and no spare; the first rank or both ranks end this way."""
WITH_A_SPARE: dict[str, list[End]] = {
    "returns": [RETURNED, RETURNED, A_SPARE],
    "health_check fails": [(1, "BadDevice: planned fault"), RETURNED, RETURNED],
    "exits with 3": [(3, REMOVED + "SystemExit: 3"), RETURNED, RETURNED],
    "exits with 75 everywhere": [(75, ""), (75, ""), (75, "")],
}
BY_NVRX_NAMES: dict[str, list[End]] = {
    "health_check fails": [(1, "HealthCheckError: BadDevice: planned fault"), RETURNED],
    "finalize fails": [(1, "BadDevice: planned fault"), RETURNED],
    "exits with 3": [(3, REMOVED + "SystemExit: 3"), RETURNED],
}
"""NVRx's default continues with fewer ranks."""
SAMPLE = {"returns", "completion fails", "health_check fails", "fails everywhere", "exits with 3", "is killed"}
"""Endings in ``make test``."""


def last_line(output: str) -> str:
    """Return the last line of the output without the time and level of the log."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return re.sub(r"^\S+ [A-Z]+ +(\[.*?\] )?", "", lines[-1]) if lines else ""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    ("ending", "names", "expected"),
    [
        *(
            pytest.param(ending, "ours", expected, marks=[pytest.mark.extended] * (ending not in SAMPLE))
            for ending, expected in ENDS.items()
        ),
        *(
            pytest.param(ending, names, expected, marks=pytest.mark.extended)
            for names, ends in (("ours", WITH_A_SPARE), ("nvrx", BY_NVRX_NAMES))
            for ending, expected in ends.items()
        ),
    ],
)
def test_each_rank_has_the_exit_code_of_its_ending(
    ending: str, names: str, expected: list[End], tmp_path: Path
) -> None:
    """Each rank ends with the exit code and the exception of the table; a rank without the function's result does
    not exit with 0, unless its function called ``sys.exit(0)``."""
    with RankProcesses(RANKS, ending, "2", names, world_size=len(expected), directory=tmp_path) as ranks:
        codes = ranks.wait(timeout_s=PATIENCE_S)
        outputs = [ranks.output(rank) for rank in range(len(expected))]
    assert codes == [code for code, _ in expected], outputs
    for (_, pattern), output in zip(expected, outputs, strict=True):
        assert re.search(pattern, last_line(output)), output


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    ("ending", "cause"), [("health_check fails", "BadDevice: planned fault"), ("exits with 3", "exit code 3: ")]
)
def test_the_launcher_reports_the_first_removed_rank(ending: str, cause: str, tmp_path: Path) -> None:
    """Under ``outlast run`` and ``torchrun`` the job fails; the last line of ``outlast run`` has the rank that was
    removed first, not a rank that could not continue without it."""
    with Cluster(
        *(RANKS, ending, "2", "ours"), run_dir=tmp_path / "run", num_nodes=1, options=["--max-restarts=0"]
    ) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [1]
        last = job.agent(0).output().strip().splitlines()[-1]
    assert "rank 0" in last
    assert cause in last, last
    token = f"torchrun-{os.getpid()}-{tmp_path.name}"
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")]
    try:
        done = subprocess.run(
            [*command, str(RANKS), ending, "2", "ours"],
            env={**os.environ, TOKEN: token, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        end_processes(token)
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize("code", [None, 0, False, 16, 17, 18, 75, 93, ExitReason.PREEMPTED])
def test_an_orderly_exit_code_is_not_the_loss_of_a_rank(code: object) -> None:
    """0 and the codes with which all ranks of a session exit together do not count as the loss of a rank."""
    assert is_orderly_exit(code)


@pytest.mark.parametrize("code", [1, 2, 3, 19, 128, -1, "text", [0], 0.5, True])
def test_any_other_exit_code_is_the_loss_of_the_rank(code: object) -> None:
    """A rank that exits with another code has failed and keeps its code."""
    assert not is_orderly_exit(code)
