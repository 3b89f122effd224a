"""Common ways to train on a GPU: a rank is killed, resumes, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import pytest
from device_runs import ON_GPU
from killed_variants import check_no_bit_changes

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(240)]  # inductor compiles

SAVE_INTERVAL = 4
VARIANTS = ["compile", "amp", "fused", "fsdp2", *(["graph"] if ON_GPU else [])]
OVERLAPPED = ["fused", "fsdp2", *(["graph"] if ON_GPU else [])]


@pytest.mark.parametrize(
    ("variant", "overlap"),
    [
        *(pytest.param(variant, False, id=variant) for variant in VARIANTS),
        *(pytest.param(variant, True, id=f"{variant}-overlapped") for variant in OVERLAPPED),
    ],
)
def test_a_killed_rank_changes_no_bit(
    variant: str, overlap: bool, deterministic: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With torch.compile, float16 with a scaled loss, a fused optimizer, FSDP2, and a CUDA graph of forward and
    backward, a killed rank resumes, and weights, optimizer state, losses and the loss scale are those of an undisturbed
    run, also with overlap_staging in the run with the fault."""
    check_no_bit_changes(variant, deterministic, tmp_path_factory, overlap=overlap, interval=SAVE_INTERVAL)
