"""Drawn plans: reproducible by seed, with every kind in turn; invalid requests are rejected in one line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.chaos import FaultKind, FaultPlan
from outlast.chaos.draws import draw_plan, parse_kinds
from outlast.cli.chaos import chaos
from outlast.errors import ConfigError

_kinds = st.lists(st.sampled_from(FaultKind), min_size=1, unique=True)


@settings(max_examples=30)
@given(seed=st.integers(min_value=0), kinds=_kinds, count=st.integers(1, 30), num_ranks=st.integers(1, 64))
def test_a_seed_always_draws_the_same_plan(seed: int, kinds: list[FaultKind], count: int, num_ranks: int) -> None:
    """The same seed draws the same plan, which survives its file; each round has every kind, each at a different
    moment."""
    plans = [draw_plan(seed, kinds, every_s=2.0, minutes=count / 30, num_ranks=num_ranks) for _ in range(2)]
    assert plans[0] == plans[1] == FaultPlan.from_mapping(tomllib.loads(plans[0].to_toml()))
    drawn = plans[0].faults
    assert [fault.at_s for fault in drawn] == [2.0 * (index + 1) for index in range(len(drawn))]
    assert len(drawn) in (count - 1, count)  # rounding to minutes may drop the last one
    for begin in range(0, len(drawn) - len(kinds) + 1, len(kinds)):
        assert {fault.kind for fault in drawn[begin : begin + len(kinds)]} == set(kinds)
    assert all(fault.rank is None or fault.rank < num_ranks for fault in drawn)


def test_different_seeds_draw_different_plans() -> None:
    """Ten seeds draw ten different plans."""
    texts = {draw_plan(s, list(FaultKind), every_s=5, minutes=10, num_ranks=4).to_toml() for s in range(10)}
    assert len(texts) == 10


def test_written_plans_load_as_the_same_plan(tmp_path: Path) -> None:
    """TOML on the terminal, and TOML or JSON in a file by its suffix, are the same plan."""
    common = ["plan", "--seed", "7", "--ranks", "4", "--minutes", "2"]
    printed = CliRunner().invoke(chaos, common)
    assert printed.exit_code == 0, printed.output
    plan = FaultPlan.from_mapping(tomllib.loads(printed.stdout))
    assert len(plan.faults) == 24
    for name in ("plan.toml", "plan.json"):
        assert CliRunner().invoke(chaos, [*common, "-o", str(tmp_path / name)]).exit_code == 0
        assert FaultPlan.load(tmp_path / name) == plan
    as_json = CliRunner().invoke(chaos, [*common, "--json"])
    assert FaultPlan.from_mapping(json.loads(as_json.stdout)) == plan


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "--ranks", "4", "--kinds", "kil"], "'kil' is unknown; did you mean 'kill'?"),
        (["plan", "--ranks", "4", "--kinds", ","], "--kinds names none"),
        (["plan", "--ranks", "4", "--minutes", "0.01"], "no room for a fault every 5 s"),
        (["plan", "--ranks", "4", "--every", "0"], "must be above 0"),
        (["plan", "--ranks", "4", "--minutes", "nan"], "must be above 0"),
        (["plan", "--ranks", "4", "-o", "plan.txt"], "neither a .toml nor a .json file"),
        (["plan", "--ranks", "4", "-o", "/nowhere/plan.toml"], "cannot be written"),
        (["run", "/nowhere/plan.toml", "--", "train.py"], "/nowhere/plan.toml"),
        (["run", "{plan}", "--"], "there is no script to run"),
        (["run", "--spares", "1", "{plan}", "--", "train.py"], "--spares is for --nodes"),
        (["run", "--nodes", "2", "{plan}", "--", "--nnodes=2", "train.py"], "--nnodes is set by --nodes"),
        (["run", "--nodes", "2", "{plan}", "--", "--node-name=a", "train.py"], "--node-name is set by --nodes"),
        (["run", "{lose}", "--", "train.py"], "lose_node loses the only node's disk"),
        (["run", "{request}", "--", "train.py"], "only a test can request it"),
        (["run", "--nodes", "2", "{net}", "--", "train.py"], "partition need separate hosts; give --netns"),
        (["run", "--netns", "{net}", "--", "train.py"], "--netns is for --nodes"),
        (["soak", "--kinds", "kil"], "did you mean 'kill'?"),
        (["soak", "--keep", "{full}"], "is not empty; name a new folder"),
    ],
)
def test_invalid_arguments_are_one_error_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    """An invalid argument is rejected in one line that names it, before anything is started."""
    (tmp_path / "plan.toml").write_text("seed = 1\n")
    (tmp_path / "lose.toml").write_text(
        draw_plan(0, [FaultKind.LOSE_NODE], every_s=5, minutes=1, num_ranks=1).to_toml()
    )
    net = draw_plan(0, [FaultKind.PARTITION], every_s=5, minutes=1, num_ranks=1)
    (tmp_path / "net.toml").write_text(net.to_toml())
    (tmp_path / "request.toml").write_text('[[faults]]\nkind = "kill"\nrank = 0\non_request = true\n')
    places = {
        "{request}": str(tmp_path / "request.toml"),
        "{net}": str(tmp_path / "net.toml"),
        "{plan}": str(tmp_path / "plan.toml"),
        "{lose}": str(tmp_path / "lose.toml"),
        "{full}": str(tmp_path),
    }
    result = CliRunner().invoke(chaos, [places.get(word, word) for word in arguments], standalone_mode=False)
    assert isinstance(result.exception, ConfigError), result.output
    assert expected in str(result.exception)
    assert "\n" not in str(result.exception)


def test_all_selects_every_kind() -> None:
    """``all`` selects every kind; a list keeps its order, each kind once."""
    assert set(parse_kinds("all")) == set(FaultKind)
    assert parse_kinds("stop, kill,stop") == (FaultKind.STOP, FaultKind.KILL)
