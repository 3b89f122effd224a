"""All ranks handle a NaN of one rank in the same way, and no weight changes that must not."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from gloo_ranks import run_ranks

from outlast.errors import ConfigError, NotFinite
from outlast.numerics import FiniteCheck, NonFiniteAction, NonFiniteDetector

Model = tuple[torch.nn.Module, torch.optim.Optimizer]


@pytest.fixture
def model() -> Model:
    """A model that has stepped once and has gradients for the next step."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optim = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
        if not optim.state:
            optim.step()
    return module, optim


def _bits(model: Model) -> list[bytes]:
    module, optim = model
    tensors = [*module.parameters(), *(t for state in optim.state.values() for t in state.values())]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def test_finite_values_step_normally(model: Model) -> None:
    """With a finite loss and finite gradients the step is done, and the gradients stay."""
    found = NonFiniteDetector("skip", check_gradients=True).check(torch.tensor(1.5), model[1], iteration=4)
    assert found == FiniteCheck(iteration=4)
    assert found.finite
    assert found.should_step
    assert all(parameter.grad is not None for parameter in model[0].parameters())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, torch.tensor([1.0, math.nan]).bfloat16()])
def test_skip_changes_no_weight(model: Model, loss: torch.Tensor | float) -> None:
    """After a skip the weights and moments are bit-identical, even if the script steps all the same."""
    before = _bits(model)
    found = NonFiniteDetector("skip").check(loss, [model[1]], iteration=9)
    assert (found.action, found.should_step, found.loss_ranks) == (NonFiniteAction.SKIP, False, (0,))
    assert all(parameter.grad is None for parameter in model[0].parameters())
    model[1].step()
    assert _bits(model) == before


def test_warn_continues_training(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """The warning contains the iteration and the rank, and the step is done with its gradients."""
    with caplog.at_level(logging.WARNING, logger="outlast"):
        found = NonFiniteDetector().check(math.nan, model[1], iteration=9)
    assert found.should_step
    assert not found.finite
    assert all(parameter.grad is not None for parameter in model[0].parameters())
    assert [record.getMessage() for record in caplog.records] == [
        "NaN or infinity at iteration 9: loss of rank 0; 1 in a row, action warn"
    ]


def test_raise_raises_before_the_step(model: Model) -> None:
    """The error carries rank and iteration, and a script that catches it and steps changes no weight."""
    before = _bits(model)
    with pytest.raises(NotFinite, match="iteration 9: loss of rank 0") as caught:
        NonFiniteDetector("raise").check(math.nan, model[1], iteration=9)
    assert (caught.value.rank, caught.value.iteration) == (0, 9)
    model[1].step()
    assert _bits(model) == before


def test_rollback_calls_the_callback(model: Model) -> None:
    """The callback gets the finding once per invalid step, after the invalid gradients were cleared."""
    calls = []

    def roll_back(found: FiniteCheck) -> None:
        assert all(parameter.grad is None for parameter in model[0].parameters())
        calls.append(found)

    detector = NonFiniteDetector("rollback", on_rollback=roll_back)
    assert detector.check(1.0, model[1]).finite
    found = detector.check(math.nan, model[1])
    assert not found.should_step
    assert calls == [found]
    assert found.iteration == 1


def test_rollback_without_a_callback_is_an_error(model: Model) -> None:
    """Without a callback the step is rejected, and the error states what is missing; a bound callback is used."""
    detector = NonFiniteDetector("rollback")
    with pytest.raises(NotFinite, match="give on_rollback"):
        detector.check(math.nan, model[1], iteration=3)
    calls = []
    detector.bind(calls.append)
    detector.bind(lambda found: pytest.fail("the first one bound is it"))
    detector.check(math.nan, model[1], iteration=3)
    assert len(calls) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_nonfinite_gradient_element_is_detected(dtype: torch.dtype, bad: float) -> None:
    """A single NaN or infinity among the gradients is detected, whatever the loss is."""
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in (3, 0, 70, 1)]
    optim = torch.optim.SGD([*parameters, torch.nn.Parameter(torch.ones(2))])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    detector = NonFiniteDetector("skip", check_gradients=True)
    assert detector.check(1.0, optim).finite
    assert parameters[2].grad is not None
    parameters[2].grad[69] = bad
    found = detector.check(1.0, optim)
    assert (found.loss_ranks, found.gradient_ranks) == ((), (0,))


def test_large_gradients_are_finite() -> None:
    """The largest finite gradients of a narrow type cause no alarm, since they are not summed."""
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 65504.0)
    assert NonFiniteDetector("raise", check_gradients=True).check(None, torch.optim.SGD([parameter])).finite


def test_sparse_gradients_are_checked() -> None:
    """The values of a sparse gradient are checked."""
    table = torch.nn.Embedding(10, 2, sparse=True)
    optim = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 3])).sum().backward()
    detector = NonFiniteDetector("skip", check_gradients=True)
    assert detector.check(None, optim).finite
    table.weight.grad._values()[1, 1] = math.nan
    assert not detector.check(None, optim).finite


def test_contradictory_settings_are_rejected(model: Model) -> None:
    """An unknown action, a negative limit, and gradients without a model are rejected at once."""
    with pytest.raises(ConfigError, match="'warn', 'skip', 'raise', 'rollback'"):
        NonFiniteDetector("ignore")
    with pytest.raises(ConfigError, match="max_consecutive -1"):
        NonFiniteDetector(max_consecutive=-1)
    with pytest.raises(ConfigError, match="needs the optimizers"):
        NonFiniteDetector(check_gradients=True).check(1.0)


def test_uncaught_limit_exits_17(capfd: pytest.CaptureFixture[str]) -> None:
    """The error at the limit is a NotFinite, and ends a script that does not catch it with 17; below the limit it does
    not."""
    detector = NonFiniteDetector("skip", max_consecutive=2)
    assert not detector.check(math.nan).finite
    with pytest.raises(NotFinite, match="2 in a row, action skip, which is the limit") as caught:
        detector.check(math.nan)
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == 17
    with pytest.raises(NotFinite) as caught:
        NonFiniteDetector("raise").check(math.nan)
    assert not isinstance(caught.value, SystemExit)


def test_limit_0_allows_any_number_of_nonfinite_steps() -> None:
    """Any number of consecutive invalid steps is allowed with 0; with a limit, a finite step resets the count."""
    detector = NonFiniteDetector("warn", max_consecutive=0)
    assert [detector.check(math.nan).num_consecutive for _ in range(20)] == list(range(1, 21))
    detector.check(1.0)
    assert detector.check(math.nan).num_consecutive == 1


def test_many_ranks_are_listed_in_one_line() -> None:
    """A message lists the first ranks, and counts the others."""
    found = FiniteCheck(iteration=5, action=NonFiniteAction.WARN, loss_ranks=(3,), gradient_ranks=tuple(range(100)))
    assert "loss of rank 3, gradients of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 others" in found.describe()


@pytest.mark.process
def test_all_ranks_handle_one_ranks_nan_identically() -> None:
    """A NaN in rank 1's loss warns, skips, raises or rolls back on both ranks at that step, and rank 1 is reported."""
    results = [scenes["actions"] for scenes in run_ranks("nonfinite_ranks", ["actions"], 2)]
    for scenes in results:
        for action in ("warn", "skip", "rollback"):
            steps = scenes[action]["steps"]
            assert [step["action"] for step in steps[:3]] == [None, None, action]
            assert (steps[2]["iteration"], steps[2]["loss_ranks"]) == (2, [1])
            assert steps[2]["gradient_ranks"] == [0, 1], "averaged gradients are bad everywhere"
            assert steps[2]["moved"] is (action == "warn")
            assert steps[2]["gradients"] is (action == "warn")
            assert [step["moved"] for step in steps[:2]] == [True, True]
        assert scenes["skip"]["steps"][3]["moved"]
        ((text, rank, iteration),) = scenes["raise"]["errors"]
        assert "loss of rank 1" in text
        assert (rank, iteration) == (1, 2)
        assert scenes["rolled_back_at"] == [2]
    assert results[0]["skip"]["weights"] == results[1]["skip"]["weights"]


@pytest.mark.process
def test_limit_optimizer_and_shards_on_two_ranks() -> None:
    """The limit raises on both ranks, and the identified one logs it; a checked optimizer skips on both; an invalid
    shard is detected by all."""
    results = run_ranks("nonfinite_ranks", ["limit", "watched", "sharded"], 2)
    assert [len(scenes["limit"]["logged"]) for scenes in results] == [0, 1]
    for scenes in results:
        assert scenes["limit"]["bad"] == [True, True, False, True, True]
        text, rank, iteration = scenes["limit"]["error"]
        assert "iteration 105: loss of rank 1; 3 in a row" in text
        assert (rank, iteration) == (1, 105)
        assert scenes["watched"]["moved"] == [True, True, False, True]
        assert (scenes["sharded"]["loss_ranks"], scenes["sharded"]["gradient_ranks"]) == ([], [1])
