"""Compiled CUDA graphs, states in float8 and bfloat16, and expandable segments: a killed rank changes no bit."""

from __future__ import annotations

import pytest
from device_runs import ON_GPU, needs_gpu
from killed_variants import check_no_bit_changes

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(240)]  # inductor compiles

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@needs_gpu("graphs are the GPU's")
@pytest.mark.parametrize("overlap", [False, True], ids=["at_once", "overlapped"])
def test_a_kill_under_compiled_cuda_graphs_changes_no_bit(
    overlap: bool, deterministic: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Model and optimizer are compiled with mode="reduce-overhead": torch runs, captures, and then replays CUDA graphs.
    Every step ends with a save, so that one save precedes the first replay."""
    check_no_bit_changes("reduce-overhead", deterministic, tmp_path_factory, overlap=overlap, interval=1)


@pytest.mark.parametrize("overlap", [False, True], ids=["at_once", "overlapped"])
def test_a_kill_with_float8_and_bfloat16_changes_no_bit(
    overlap: bool, deterministic: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Parameters and optimizer state are bfloat16; each step makes float8 copies of the weights with which the next one
    computes."""
    check_no_bit_changes("float8", deterministic, tmp_path_factory, overlap=overlap, interval=4)


@pytest.mark.parametrize("variant", ["fused", *(["graph"] if ON_GPU else [])])
def test_a_kill_with_expandable_segments_changes_no_bit(
    variant: str, deterministic: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The run with the fault uses torch's allocator with expandable segments, whose memory the driver maps in parts:
    overlapped saves and the load have the same result."""
    check_no_bit_changes(
        variant, deterministic, tmp_path_factory, overlap=True, interval=4, killed_environment=EXPANDABLE
    )
