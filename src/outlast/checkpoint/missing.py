"""Complete a checkpoint with the live values of state that it lacks (``missing="keep"``).

Names of the mapping, keys of modules, and parameters of optimizers keep their present values, for example after a user
adds a layer. An optimizer numbers its parameters, and a new one shifts all that follow, so parameters are matched by
whether the module's checkpoint has them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from outlast.checkpoint.state import is_nested, may_be_absent
from outlast.errors import Mismatch


def find_missing(live: Mapping[str, Any], saved: Any, path: str = "") -> list[str]:
    """Return the names in a live state that a checkpoint lacks, in the live state's order."""
    found: list[str] = []
    for name, value in live.items():
        here = f"{path}{name}"
        if not isinstance(saved, Mapping) or name not in saved:
            found += [] if may_be_absent(value) else [here]
        elif isinstance(value, torch.nn.Module):
            found += [f"{here}.{key}" for key in value.state_dict() if key not in saved[name]]
        elif is_nested(value):
            found += find_missing(value, saved[name], f"{here}.")
    return found


def complete(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state, completed with live values in modules and optimizers.

    Args:
        saved: The saved state, with anything in place of tensors; it is not changed.

    Raises:
        Mismatch: A module has no key in common with the saved one, or an optimizer's parameters do not match.
    """
    return _complete(live, saved, "", {id(parameter) for parameter in _new_parameters(live, saved)})


def _complete(live: Mapping[str, Any], saved: Mapping[str, Any], path: str, new: set[int]) -> dict[str, Any]:
    whole = dict(saved)
    for name, value in live.items():
        here, found = f"{path}{name}", saved.get(name)
        if not isinstance(found, Mapping):
            continue
        if isinstance(value, torch.nn.Module):
            whole[name] = _complete_module(value, found, here)
        elif isinstance(value, torch.optim.Optimizer):
            whole[name] = _complete_optimizer(value, found, here, new)
        elif is_nested(value):
            whole[name] = _complete(value, found, f"{here}.", new)
    return whole


def _new_parameters(live: Mapping[str, Any], saved: Any) -> Iterator[torch.nn.Parameter]:
    for name, value in live.items():
        found = saved.get(name, {}) if isinstance(saved, Mapping) else {}
        if isinstance(value, torch.nn.Module):
            for key, parameter in value.named_parameters(remove_duplicate=False):
                if key not in found:
                    yield parameter
        elif is_nested(value):
            yield from _new_parameters(value, found)


def _complete_module(module: torch.nn.Module, saved: Mapping[str, Any], path: str) -> Any:
    content = module.state_dict()
    if content and content.keys().isdisjoint(saved):
        first, other = next(iter(content)), next(iter(saved), "nothing")
        raise Mismatch(
            f"state {path!r} has no key in common with what was saved of it (here {first!r}, there {other!r}); is it "
            "the same module?"
        )
    whole: Any = copy.copy(saved)  # an OrderedDict keeps the modules' versions
    whole.update({key: value for key, value in content.items() if key not in saved})
    return whole


def _complete_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], path: str, new: set[int]
) -> dict[str, Any]:
    content, groups = optimizer.state_dict(), saved.get("param_groups")
    known = [[id(parameter) not in new for parameter in group["params"]] for group in optimizer.param_groups]
    if all(map(all, known)) or not isinstance(groups, list) or not isinstance(saved.get("state"), Mapping):
        return dict(saved)
    sizes = [len(group["params"]) for group in groups], [sum(some) for some in known]
    if sizes[0] != sizes[1]:
        raise Mismatch(
            f"state {path!r} was saved with parameter groups of {sizes[0]}, here they are {sizes[1]} without the "
            "parameters that the checkpoint lacks; keep the groups, and add new parameters to one of them"
        )
    state, whole = {}, []
    for group, before, are_known in zip(content["param_groups"], groups, known, strict=True):
        numbers = iter(before["params"])
        for number, is_known in zip(group["params"], are_known, strict=True):
            source, old = (saved["state"], next(numbers)) if is_known else (content["state"], number)
            if old in source:
                state[number] = source[old]
        whole.append({**before, **{key: group[key] for key in ("params", "param_names") if key in group}})
    return {**saved, "state": state, "param_groups": whole}
