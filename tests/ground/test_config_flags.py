"""The --ft-* options: one for each field, both spellings, clear errors."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from outlast.config import FaultToleranceConfig
from outlast.config.base import from_mapping
from outlast.config.sources import add_ft_arguments, ft_config_from, unknown_flag_message
from outlast.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """Make a parser of torchrun's shape: options, a script, and the script's own arguments."""
    parser = argparse.ArgumentParser(prog="outlast run")
    parser.add_argument("--nnodes", default="1:1")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    add_ft_arguments(parser)
    return parser


def given(*argv: str) -> dict[str, Any]:
    return ft_config_from(make_parser().parse_args([*argv, "train.py", "--ft-simulate_fault", "--lr", "1"]))


def test_every_field_has_an_option_with_help() -> None:
    """Each field of FaultToleranceConfig is an option whose help says what it does and its default."""
    text = " ".join(make_parser().format_help().split())
    for field in dataclasses.fields(FaultToleranceConfig):
        assert f"--ft-{field.name.replace('_', '-')}" in text
    assert "--ft_" not in text
    assert text.count("(default: ") == len(dataclasses.fields(FaultToleranceConfig))
    assert "=true" not in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--ft-rank_section_timeouts=setup:600,step:180.5,save:none"],
        ["--ft-rank-section-timeouts=setup:600,step:180.5,save:none"],
        ["--ft-rank-section-timeouts", "setup:600,step:180.5,save:none"],
        ["--ft_rank_section_timeouts=setup:600,step:180.5,save:none"],
        ["--ft_rank-section-timeouts", "setup:600,step:180.5,save:none"],
    ],
)
def test_dash_and_underscore_are_alike(argv: list[str]) -> None:
    """An option may be written with - or _, with = or a blank."""
    assert given(*argv) == {"rank_section_timeouts": {"setup": 600.0, "step": 180.5, "save": None}}


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--ft-simulate_fault"], True),
        (["--ft-simulate-fault"], True),
        (["--ft-simulate_fault=true"], True),
        (["--ft-simulate-fault=True"], True),
        (["--ft-simulate_fault=1"], True),
        (["--ft-simulate_fault=false"], False),
        (["--ft-simulate_fault", "--ft_simulate_fault=off"], False),
    ],
)
def test_switch_never_swallows_the_script(argv: list[str], value: bool) -> None:
    """A switch may stand bare or with a truth value; a bare one leaves the script's name alone."""
    options = make_parser().parse_args([*argv, "train.py", "--epochs", "3"])
    assert options.training_script == "train.py"
    assert options.training_script_args == ["--epochs", "3"]
    assert ft_config_from(options) == {"simulate_fault": value}


def test_only_given_options_are_returned() -> None:
    """What was not given is not there, so that a file's value is not overwritten by a default."""
    assert given() == {}
    assert given("--ft-safety_factor=3") == {"safety_factor": 3.0}


def test_none_disables() -> None:
    """The text none switches a timeout off."""
    assert given("--ft-rank_heartbeat_timeout=none") == {"rank_heartbeat_timeout": None}


def test_options_make_a_config() -> None:
    """The returned values are accepted by the config as they are."""
    values = given("--ft-rank_section_timeouts=step:5", "--ft-max-node-faults", "2", "--ft-calc_ft_timeouts")
    config = from_mapping(FaultToleranceConfig, values, where="command line")
    assert config.rank_section_timeouts == {"step": 5.0}
    assert (config.max_node_faults, config.calc_ft_timeouts) == (2, True)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--ft-rank-heartbeat-timeout=soon",
            "--ft-rank-heartbeat-timeout: 'soon' does not fit; write a number",
        ),
        ("--ft-max-node-faults=1.5", "--ft-max-node-faults: '1.5' does not fit; write a whole number"),
        ("--ft-rank_section_timeouts=step", "'step' is not in the form name:seconds"),
        ("--ft-rank_section_timeouts=step:1,step:2", "'step' is given twice"),
        ("--ft-rank_section_timeouts=step:x", "does not fit; write name:seconds"),
    ],
)
def test_bad_value_names_the_option(flag: str, message: str) -> None:
    """A value that does not fit is refused in one line that names the option."""
    with pytest.raises(ConfigError) as caught:
        given(flag)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["--ft-rank_section=step:1", "--ft-sim", "--ft-safety=3"])
def test_short_names_are_not_guessed(flag: str) -> None:
    """A shortened option is unknown, never taken for a longer one."""
    _, unknown = make_parser().parse_known_args([flag, "train.py"])
    assert unknown == [flag]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--ft-saftey_factor=3", "unknown option --ft-saftey_factor; did you mean --ft-safety-factor?"),
        ("--ft-rank-heartbeat-timout", "did you mean --ft-rank-heartbeat-timeout?"),
        ("--ft-rank_section-timeouts=step:1", "did you mean --ft-rank-section-timeouts?"),
        ("--ft-xyzzy", "unknown option --ft-xyzzy; see outlast run --help for the known ones"),
        ("--ft-simulate_fault=maybe", "neither true nor false; write --ft-simulate_fault=true"),
    ],
)
def test_unknown_option_names_the_nearest(flag: str, message: str) -> None:
    """An unknown --ft- option is answered with the closest known one."""
    assert message in unknown_flag_message(flag)
