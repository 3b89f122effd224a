"""Straggler detection settings have the reference's names and defaults, and contradictions are rejected."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from outlast.config import Config, StragglerDetectionConfig
from outlast.config.base import from_mapping
from outlast.config.sources import load_config
from outlast.errors import ConfigError

REFERENCE = {
    "enabled": False,
    "report_time_interval": 300.0,
    "calc_relative_gpu_perf": True,
    "calc_individual_gpu_perf": True,
    "num_gpu_perf_scores_to_print": 5,
    "gpu_relative_perf_threshold": 0.7,
    "gpu_individual_perf_threshold": 0.7,
    "stop_if_detected": False,
    "enable_logging": True,
    "profiling_interval": 1,
}


def test_file_section_sets_straggler_detection(tmp_path: Path) -> None:
    """A session reads the section of its file; without the section nothing is timed."""
    path = tmp_path / "run.toml"
    path.write_text("[straggler_detection]\nenabled = true\nreport_time_interval = 60\nstop-if-detected = true\n")
    found = load_config(path).straggler_detection
    assert found == StragglerDetectionConfig(enabled=True, report_time_interval=60.0, stop_if_detected=True)
    assert Config().straggler_detection is None
    path.write_text("[straggler_detection]\nenable = true\n")
    with pytest.raises(ConfigError, match="did you mean 'enabled'"):
        load_config(path)


def test_fields_and_defaults_equal_the_reference() -> None:
    """Users of Megatron-Bridge and NeMo find the same names and values."""
    config = StragglerDetectionConfig()
    assert {name: getattr(config, name) for name in REFERENCE} == REFERENCE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"report_time_interval": 0.0}, "report_time_interval=0.0 must be above 0"),
        ({"report_time_interval": math.inf}, "must be finite"),
        ({"gpu_relative_perf_threshold": 1.1}, "gpu_relative_perf_threshold=1.1 must be from 0 to 1"),
        ({"gpu_individual_perf_threshold": -0.1}, "gpu_individual_perf_threshold=-0.1 must be from 0 to 1"),
        ({"noticeable_score": 90.0}, "noticeable_score=90.0 must be from 0 to 1"),
        ({"num_gpu_perf_scores_to_print": -1}, "num_gpu_perf_scores_to_print=-1"),
        ({"profiling_interval": 0}, "profiling_interval=0 must be at least 1"),
        ({"confirmations": 0}, "confirmations=0 must be at least 1"),
        ({"logger_name": ""}, "logger_name must not be empty"),
        (
            {"enabled": True, "calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False},
            "enabled is on, but calc_relative_gpu_perf and calc_individual_gpu_perf are both off",
        ),
        (
            {"stop_if_detected": True, "calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False},
            "stop_if_detected is on, but",
        ),
    ],
)
def test_invalid_and_contradictory_values_are_rejected(values: dict[str, Any], message: str) -> None:
    """A value out of range or a contradiction is rejected in a line that contains the broken rule."""
    with pytest.raises(ConfigError) as raised:
        StragglerDetectionConfig(**values)
    assert message in str(raised.value)


def test_disabled_detection_needs_no_calculation() -> None:
    """If detection is off, every calculation may be off too."""
    StragglerDetectionConfig(calc_relative_gpu_perf=False, calc_individual_gpu_perf=False)


def test_text_values_are_read() -> None:
    """Settings may be given as text, with dashes in their names."""
    config = from_mapping(StragglerDetectionConfig, {"report-time-interval": "60", "enabled": "yes"}, where="here")
    assert (config.report_time_interval, config.enabled) == (60.0, True)
