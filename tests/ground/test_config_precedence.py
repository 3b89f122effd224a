"""Settings from several sources: an option precedes the file, which precedes the script's config, field by field."""

from __future__ import annotations

import pytest

from outlast.config import FaultToleranceConfig
from outlast.config.sources import LayeredSettings, merge_under
from outlast.errors import ConfigError

LAYERS = LayeredSettings(
    options={"rank_heartbeat_timeout": 10.0},
    file={"rank_heartbeat_timeout": 20.0, "safety_factor": 2.0, "initial_rank_heartbeat_timeout": 100.0},
    file_name="run.toml",
)
SCRIPT = FaultToleranceConfig(safety_factor=4.0, rank_section_timeouts={"step": 3.0}, max_node_faults=3)


def test_first_source_of_each_field_takes_precedence() -> None:
    """Option, file, script and default apply to the fields that no earlier source sets, and the source is reported."""
    layers = LAYERS.with_script(SCRIPT.to_json())
    assert layers.config.rank_heartbeat_timeout == 10.0
    assert layers.config.safety_factor == 2.0
    assert layers.config.rank_section_timeouts == {"step": 3.0}
    assert layers.config.rank_out_of_section_timeout is None
    names = ("rank_heartbeat_timeout", "safety_factor", "rank_section_timeouts", "rank_out_of_section_timeout")
    assert [layers.source(name) for name in names] == ["option", "run.toml", "script's config", "default"]
    assert layers.source("max_node_faults") == "script's config"  # set explicitly to the default value


def test_hang_detection_is_on_unless_disabled() -> None:
    """Without a setting hang detection is on; the script's config can disable it, and an option precedes the script."""
    off = FaultToleranceConfig(enable_ft_package=False).to_json()
    assert LayeredSettings().config.enable_ft_package
    assert not LayeredSettings().with_script(off).config.enable_ft_package
    assert LayeredSettings(options={"enable_ft_package": True}).with_script(off).config.enable_ft_package


def test_contradiction_between_sources_is_rejected() -> None:
    """A script's value that contradicts an option is rejected, and the error contains the option as typed and the other
    source."""
    script = FaultToleranceConfig(rank_heartbeat_timeout=300.0)
    typed = "--ft-initial_rank_heartbeat_timeout=100"
    layers = LayeredSettings(
        options={"initial_rank_heartbeat_timeout": 100.0}, typed={"initial_rank_heartbeat_timeout": typed}
    )
    with pytest.raises(ConfigError) as caught:
        layers.with_script(script.to_json())
    for text in (f"{typed} must be at least", "rank_heartbeat_timeout=300.0 (script's config)"):
        assert text in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank_heartbeat_timeout": 3', '{"from a later version": 1}'])
def test_invalid_settings_text_is_rejected(text: str) -> None:
    """Truncated text, or text of another version, is rejected as a whole by agents and workers."""
    with pytest.raises(ConfigError):
        LayeredSettings().with_script(text)
    if text:  # without settings from the launcher a worker has the script's config only
        with pytest.raises(ConfigError):
            merge_under(text, SCRIPT)


def test_worker_and_agent_merge_the_same_settings() -> None:
    """The launcher's settings reach the worker unchanged and do not change the script's other fields."""
    merged = merge_under(LAYERS.launcher.to_json(), SCRIPT)
    assert (merged.rank_heartbeat_timeout, merged.safety_factor) == (10.0, 2.0)
    assert merged.rank_section_timeouts == {"step": 3.0}
    assert merge_under("{}", SCRIPT) == merge_under(None, SCRIPT) == SCRIPT
    assert merge_under(None, None) == FaultToleranceConfig()
