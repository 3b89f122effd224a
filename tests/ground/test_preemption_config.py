"""Preemption settings have the names that users know, and contradictions are rejected with both names."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from outlast import Config, PreemptionConfig
from outlast.config.sources import load_config
from outlast.errors import ConfigError


def test_defaults_equal_the_reference() -> None:
    """Users of other systems find the same names and values."""
    config = PreemptionConfig()
    assert config.exit_signal_handler_for_dataloader is False
    assert config.preempt_time == 60
    assert config.shutdown_timeout == 600
    assert config.exit_interval is None
    assert config.exit_duration_in_mins is None
    assert config.signal_names is None
    assert Config().preemption is None


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("SIGTERM", ("SIGTERM",)),
        ("SIGTERM, SIGUSR1", ("SIGTERM", "SIGUSR1")),
        ("SIGTERM,SIGTERM", ("SIGTERM",)),
        (signal.SIGUSR2, ("SIGUSR2",)),
    ],
)
def test_signals_are_accepted_in_several_notations(given: Any, names: tuple[str, ...]) -> None:
    """A name, several names with commas, or Python's constant."""
    assert PreemptionConfig(exit_signal=given).signal_names == names


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exit_signal": "SIGKILL"}, ("exit_signal", "SIGKILL")),
        ({"exit_signal": "SIGTREM"}, ("exit_signal", "SIGTERM")),
        ({"exit_signal": "SIGTERM", "exit_signal_handler": False}, ("exit_signal=", "exit_signal_handler")),
        (
            {"exit_signal_handler_for_dataloader": True, "exit_signal_handler": False},
            ("exit_signal_handler_for_dataloader", "exit_signal_handler is off"),
        ),
        ({"poll_interval": 90.0}, ("poll_interval", "preempt_time")),
        ({"poll_interval": 0.0}, ("poll_interval",)),
        ({"shutdown_timeout": -1.0}, ("shutdown_timeout",)),
        ({"preempt_time": -1.0}, ("preempt_time",)),
        ({"notice_url": "file:///etc/passwd"}, ("notice_url", "notice_file")),
        ({"notice_url_header": "A: b"}, ("notice_url_header", "notice_url;")),
        ({"notice_url": "http://x", "notice_url_header": "A b"}, ("notice_url_header", "Name: value")),
        ({"notice_plugin": "module"}, ("notice_plugin", "package.module:name")),
        ({"exit_interval": 0}, ("exit_interval",)),
        ({"exit_duration_in_mins": 0.0}, ("exit_duration_in_mins",)),
    ],
)
def test_contradictions_are_rejected(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    """The message contains the invalid setting and the one that it contradicts."""
    with pytest.raises(ConfigError) as refused:
        PreemptionConfig(**settings)
    for word in words:
        assert word in str(refused.value)


def test_file_section_sets_preemption(tmp_path: Any) -> None:
    """The [preemption] table of a TOML file is read; 0 means no deadline."""
    path = tmp_path / "outlast.toml"
    path.write_text('[preemption]\nexit_signal = "SIGUSR1"\nshutdown_timeout = 0\nexit_interval = 100\n')
    config = load_config(path).preemption
    assert config is not None
    assert (config.signal_names, config.shutdown_timeout, config.exit_interval) == (("SIGUSR1",), 0, 100)
