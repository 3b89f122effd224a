"""Settings from several sources: an option comes before the file, that before the script's config, field by field."""

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


def test_each_field_comes_from_the_first_source_that_gives_it() -> None:
    """Option, file, script and default each hold for the fields that nothing before them gives, and are named."""
    layers = LAYERS.with_script(SCRIPT.to_json())
    assert layers.config.rank_heartbeat_timeout == 10.0
    assert layers.config.safety_factor == 2.0
    assert layers.config.rank_section_timeouts == {"step": 3.0}
    assert layers.config.rank_out_of_section_timeout is None
    names = ("rank_heartbeat_timeout", "safety_factor", "rank_section_timeouts", "rank_out_of_section_timeout")
    assert [layers.source(name) for name in names] == ["option", "run.toml", "script's config", "default"]
    assert layers.source("max_node_faults") == "script's config"  # given, though it is the default's value


def test_an_agent_watches_unless_a_source_says_no() -> None:
    """Nothing given means on; a no in the script's config counts, and an option's yes comes before it."""
    off = FaultToleranceConfig(enable_ft_package=False).to_json()
    assert LayeredSettings().config.enable_ft_package
    assert not LayeredSettings().with_script(off).config.enable_ft_package
    assert LayeredSettings(options={"enable_ft_package": True}).with_script(off).config.enable_ft_package


def test_a_contradiction_between_sources_names_them() -> None:
    """A script's value that contradicts an option's is refused: the option as typed, the other with its place."""
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
def test_what_is_no_settings_is_refused(text: str) -> None:
    """Text that was cut, or that another version wrote, is refused as a whole, by agents and by workers."""
    with pytest.raises(ConfigError):
        LayeredSettings().with_script(text)
    if text:  # a worker whose launcher was given nothing has the script's config alone
        with pytest.raises(ConfigError):
            merge_under(text, SCRIPT)


def test_a_worker_puts_together_what_its_agent_does() -> None:
    """What the launcher was given reaches the worker as it is, and leaves the script's other fields alone."""
    merged = merge_under(LAYERS.launcher.to_json(), SCRIPT)
    assert (merged.rank_heartbeat_timeout, merged.safety_factor) == (10.0, 2.0)
    assert merged.rank_section_timeouts == {"step": 3.0}
    assert merge_under("{}", SCRIPT) == merge_under(None, SCRIPT) == SCRIPT
    assert merge_under(None, None) == FaultToleranceConfig()
