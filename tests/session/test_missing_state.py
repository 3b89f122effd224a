"""State that is newer than the checkpoint: an average of the weights, a layer, and its parameters in the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

SCRIPT = """
import sys
import torch
import outlast

folder, what, *flags = sys.argv[1:]
torch.manual_seed(5)
first, last = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
layers = {"first": first, "last": last}
if what in ("grown", "fewer"):  # in the middle: the optimizer's later parameters get other numbers
    layers = {"first": first, "new": torch.nn.Linear(3, 3), "last": last}
if what == "shrunk":
    layers = {"first": first}
if what == "other":
    layers = {"a": torch.nn.Linear(2, 3)}
model = torch.nn.Sequential()
for name, layer in layers.items():
    model.add_module(name, layer)
optim = torch.optim.Adam(model.parameters(), lr=0.1)
state = {"model": model, "optim": optim, "more": {"count": torch.zeros(1)}}
if what == "grown":
    state["ema"] = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
    state["more"]["mean"] = torch.full((2,), 3.0)
    state["note"] = "fresh"
run = outlast.init(outlast.Config(checkpoint=outlast.CheckpointConfig(
    directory=folder + "/global", local_directory=None if "global" in flags else f"{folder}/local",
    replication=False, missing="keep" if "config" in flags else "error",
)))
new = model.new.weight.detach().clone() if what == "grown" else None
missing = "keep" if "keep" in flags or f"keep-{run.global_rank}" in flags else None
with run:
    iteration = run.restore(state, missing=missing)
    if iteration:
        steps = {name: float(optim.state[p]["step"]) for name, p in model.named_parameters() if p in optim.state}
        shapes = all(optim.state[p]["exp_avg"].shape == p.shape for p in optim.state)
        print("loaded", iteration, sorted(steps.items()), shapes, state["more"]["count"].item(), flush=True)
        print("digest", float(first.weight.double().sum()), float(last.weight.double().sum()), flush=True)
    if what == "grown" and iteration == 3:
        assert torch.equal(model.new.weight, new)
        assert all((value == 7).all() for value in state["ema"].values())
        assert state["more"]["mean"].tolist() == [3.0, 3.0] and state["note"] == "fresh"
    while run.iteration < iteration + 3:
        run.begin_step()
        optim.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
        state["more"]["count"] += 1
        run.end_step()
    run.finish(state)
    print("ends", float(first.weight.double().sum()), float(last.weight.double().sum()), flush=True)
"""


def start(tmp_path: Path, state: str, *flags: str, world_size: int = 2) -> tuple[list[int], list[str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path), state, *flags, world_size=world_size) as ranks:
        return ranks.end()


def line(output: str, word: str) -> str:
    """Return the text after a word at the beginning of a line."""
    return next(text.removeprefix(word) for text in output.splitlines() if text.startswith(word))


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "world_size"),
    [(("keep",), 2), (("keep", "global"), 2), (("config", "global"), 1)],
    ids=["local tier", "global tier", "other number of ranks, by config"],
)
def test_values_missing_in_the_checkpoint_are_kept(tmp_path: Path, flags: tuple[str, ...], world_size: int) -> None:
    """With missing="keep", a layer in the middle, its parameters, an average of the weights and plain values that
    are newer than the checkpoint keep their values. All other values are loaded, the optimizer's moments by
    parameter and not by number; rank 0 lists the missing names in one line. The next checkpoint has all of them."""
    codes, before = start(tmp_path, "old", *flags)
    assert codes == [0, 0], before
    codes, outputs = start(tmp_path, "grown", *flags, world_size=world_size)
    assert codes == [0] * world_size, outputs
    assert line(outputs[0], "digest") == line(before[0], "ends")
    expected = "[('first.bias', 3.0), ('first.weight', 3.0), ('last.bias', 3.0), ('last.weight', 3.0)] True 3.0"
    assert line(outputs[0], "loaded") == f" 3 {expected}"
    names = "model.new.weight, model.new.bias, more.mean, ema, note"
    message = f"the checkpoint of iteration 3 has no value for {names}; present values are kept"
    assert [output.count(message) for output in outputs] == [1, 0][:world_size], outputs
    codes, repeated = start(tmp_path, "grown", "global", world_size=world_size)
    assert codes == [0] * world_size, repeated
    assert line(repeated[0], "digest") == line(outputs[0], "ends")
    assert "has no value" not in repeated[0]


@pytest.mark.process
@pytest.mark.slow
def test_missing_values_are_an_error_by_default(tmp_path: Path) -> None:
    """A state with more names than the checkpoint is rejected on all ranks, even if one of them sets missing="keep";
    the error has the names and the option. A module without any saved value is rejected with the option too."""
    codes, before = start(tmp_path, "old")
    assert codes == [0, 0], before
    for flags in ((), ("keep-1",)):
        codes, outputs = start(tmp_path, "grown", *flags)
        assert codes == [1, 1], outputs
        for output in outputs:
            assert "was saved without ema, note; give the state that was saved; to keep" in output
            assert 'set missing="keep" (in a config: checkpoint.missing)' in output
            assert "\nloaded" not in output
    codes, outputs = start(tmp_path, "other", "keep")
    assert codes == [1, 1], outputs
    assert "has no key in common with what was saved of it (here 'a.weight', there 'first.weight')" in outputs[0]


@pytest.mark.process
@pytest.mark.slow
def test_saved_keys_that_a_module_lacks_are_rejected(tmp_path: Path) -> None:
    """Saved keys that a module lacks are an error with the keys, with the option too, so that trained weights are
    not dropped silently. Saved names that the mapping lacks are dropped with a warning."""
    codes, before = start(tmp_path, "grown")
    assert codes == [0, 0], before
    codes, outputs = start(tmp_path, "shrunk", "keep")
    assert codes == [1, 1], outputs
    assert "Unexpected key(s) in state_dict" in outputs[0]
    assert '"new.weight"' in outputs[0]
    codes, outputs = start(tmp_path, "fewer")
    assert codes == [0, 0], outputs
    assert "holds state that the script has no place for; it is not loaded: ema, note" in outputs[0]
