"""The --ft-* options: one for each field, both spellings, errors of one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from outlast.config import FaultToleranceConfig
from outlast.config.base import from_mapping
from outlast.errors import ConfigError
from outlast.launch.run_parser import describe_options, parse_command


def parse(*argv: str) -> dict[str, Any]:
    return parse_command([*argv, "train.py", "--ft-simulate_fault", "--lr", "1"]).fault_tolerance


def test_each_field_has_an_option_with_help() -> None:
    """Each field of FaultToleranceConfig is an option, whose help describes the field and its default."""
    helps = {option.long_name: str(option.help) for group in describe_options() for option in group.options}
    for field in dataclasses.fields(FaultToleranceConfig):
        assert "(default: " in helps[f"--ft-{field.name.replace('_', '-')}"]


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
def test_options_accept_both_spellings(argv: list[str]) -> None:
    """An option may be written with - or _, with = or a space."""
    assert parse(*argv) == {"rank_section_timeouts": {"setup": 600.0, "step": 180.5, "save": None}}


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
def test_a_switch_does_not_consume_the_script(argv: list[str], value: bool) -> None:
    """A switch may have a truth value; without one the script's name is not taken as its value."""
    command = parse_command([*argv, "train.py", "--epochs", "3"])
    assert command.args.training_script == "train.py"
    assert command.args.training_script_args == ["--epochs", "3"]
    assert command.fault_tolerance == {"simulate_fault": value}


def test_only_given_options_are_returned() -> None:
    """Options that were not given are not returned, so that defaults do not override values of a file."""
    assert parse() == {}
    assert parse("--ft-safety_factor=3") == {"safety_factor": 3.0}


def test_none_disables_a_timeout() -> None:
    """The text none disables a timeout."""
    assert parse("--ft-rank_heartbeat_timeout=none") == {"rank_heartbeat_timeout": None}


def test_options_make_a_config() -> None:
    """The config accepts the returned values as they are."""
    values = parse("--ft-rank_section_timeouts=step:5", "--ft-max-node-faults", "2", "--ft-calc_ft_timeouts")
    config = from_mapping(FaultToleranceConfig, values, where="command line")
    assert config.rank_section_timeouts == {"step": 5.0}
    assert (config.max_node_faults, config.calc_ft_timeouts) == (2, True)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--ft-rank-heartbeat-timeout=soon", "--ft-rank-heartbeat-timeout: 'soon' does not fit; write a number"),
        ("--ft-max-node-faults=1.5", "--ft-max-node-faults: '1.5' does not fit; write a whole number"),
        ("--ft-rank_section_timeouts=step", "'step' is not in the form name:seconds"),
        ("--ft-rank_section_timeouts=step:1,step:2", "'step' is given twice"),
        ("--ft-rank_section_timeouts=step:x", "does not fit; write name:seconds"),
        ("--ft-simulate_fault=maybe", "--ft-simulate_fault: 'maybe' does not fit; write true or false"),
        ("--ft-saftey_factor=3", "unknown option --ft-saftey_factor; did you mean --ft-safety-factor?"),
        ("--ft-rank-heartbeat-timout", "did you mean --ft-rank-heartbeat-timeout?"),
        ("--ft-xyzzy", "unknown option --ft-xyzzy; see outlast run --help"),
        ("--ft-rank_section=step:1", "unknown option --ft-rank_section; did you mean --ft-rank-section-timeouts?"),
        ("--ft-sim", "unknown option --ft-sim;"),
        ("--ft-safety=3", "unknown option --ft-safety; did you mean --ft-safety-factor?"),
    ],
)
def test_an_invalid_option_is_a_one_line_error(flag: str, message: str) -> None:
    """An invalid value, an unknown option and an abbreviated option are errors of one line that contain the option."""
    with pytest.raises(ConfigError) as caught:
        parse(flag)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
