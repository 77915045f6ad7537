"""Optimizer state by parameter name: taken from live optimizers, given back to them.

Rules:
* Nothing here calls ``optimizer.step()``. The helpers in ``torch.distributed.checkpoint.state_dict`` fill an
  optimizer without state by a step with zero gradients: it counts as step 1, runs the step hooks and so changes the
  training that follows.
* The layout is theirs: ``{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}``, so either side
  reads the other's.
* A mapping that is not certain is an error that lists what differs; it is never guessed.
* State keeps the dtype that it was saved in, if its parameter does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError
from ckptmirror.formats.names import live_parameters, match_names
from ckptmirror.formats.plain import encode

__all__ = ["capture_optimizer", "load_optimizer", "optimizers_of", "plan_optimizer"]


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return a single optimizer, or a list or dict of them, as a list."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def capture_optimizer(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the state of ``optimizer`` (one or several) by parameter name. Tensors are aliases, containers are new.

    Raises:
        UsageError: An optimizer holds a parameter that is not the model's, or a value that a safe load could not read
        back.
    """
    names = {id(parameter): name for name, parameter in reversed(list(live_parameters(model)))}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for one in optimizers_of(optimizer):
        raw = _state_dict(one)
        by_id: dict[Any, str] = {}
        for index, (live, saved) in enumerate(zip(one.param_groups, raw["param_groups"], strict=True)):
            for parameter, key in zip(live["params"], saved["params"], strict=True):
                if id(parameter) not in names:
                    raise UsageError(f"Parameter group {index} holds a parameter that is not in the model.")
                by_id[key] = names[id(parameter)]
            group = {k: encode(v, f"optimizer.param_groups[{index}].{k}") for k, v in saved.items() if k != "params"}
            groups.append({**group, "params": [by_id[key] for key in saved["params"]]})
        for key, value in raw["state"].items():
            name = by_id.get(key, key)
            if name in state:
                raise UsageError(f"Two optimizers have state named {name!r}.")
            state[name] = encode(dict(value) if isinstance(value, Mapping) else value, f"optimizer.state.{name}")
    return {"state": state, "param_groups": groups}


Plan = list[tuple[int, list[str]]]


def plan_optimizer(model: torch.nn.Module, optimizer: Any, saved: Mapping[str, Any]) -> list[Plan]:
    """Map each optimizer's live groups to saved ones, touching nothing: (saved group, saved name per parameter).

    Raises:
        UsageError: The parameters are grouped otherwise than in the save.
        IntegrityError: The save has no parameter groups.
    """
    groups = saved.get("param_groups")
    if not isinstance(groups, (list, tuple)) or not isinstance(saved.get("state", {}), Mapping):
        raise IntegrityError("The saved optimizer has no param_groups.")
    owner = {name: index for index, group in enumerate(groups) for name in group.get("params", ())}
    live = [(name, id(parameter)) for name, parameter in live_parameters(model)]
    saved_name = {there: name for name, there in match_names(owner, [name for name, _ in live]).items()}
    aliases: dict[int, set[str]] = {}
    for name, identity in live:
        aliases.setdefault(identity, set()).add(saved_name.get(name, name))
    plans: list[Plan] = []
    position = 0
    for one in optimizers_of(optimizer):
        plans.append(_plan(one, aliases, groups, owner, position))
        position += len(one.param_groups)
    used = {index for plan in plans for index, _ in plan}
    if unused := [index for index, group in enumerate(groups) if index not in used and group.get("params")]:
        raise _mismatch(f"the save has parameter groups {unused} that the optimizer has not")
    return plans


def load_optimizer(
    optimizer: Any, plans: Sequence[Plan], saved: Mapping[str, Any], saved_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Give ``saved`` (the layout of :func:`capture_optimizer`, fit for the live parameters) to ``optimizer``.

    Args:
        optimizer: One or several.
        saved: The state and the parameter groups.
        plans: What :func:`plan_optimizer` returned.
        saved_dtypes: The dtype in which each parameter was saved.

    Raises:
        UsageError: An optimizer does not take the state.
    """
    for one, plan in zip(optimizers_of(optimizer), plans, strict=True):
        _apply(one, plan, saved["param_groups"], saved.get("state") or {}, saved_dtypes)


def _plan(
    one: Any, aliases: Mapping[int, set[str]], groups: Sequence[Any], owner: Mapping[str, int], start: int
) -> Plan:
    plan: Plan = []
    for position, live in enumerate(one.param_groups, start):
        names = [_saved_name(aliases.get(id(parameter), set()), owner) for parameter in live["params"]]
        if missing := [
            sorted(aliases.get(id(p), {"?"}))[0] for p, n in zip(live["params"], names, strict=True) if n is None
        ]:
            raise _mismatch(f"the save has no optimizer entry for {_some(missing)}")
        found = [name for name in names if name is not None]
        indices = {owner[name] for name in found}
        if not indices and position < len(groups) and not groups[position].get("params"):
            indices = {position}
        if len(indices) != 1:
            raise _mismatch(f"the parameters of group {position} lie in {len(indices)} saved groups")
        index = indices.pop()
        if extra := sorted(set(groups[index].get("params", ())) - set(found)):
            raise _mismatch(f"saved group {index} also holds {_some(extra)}")
        plan.append((index, found))
    return plan


def _saved_name(candidates: set[str], owner: Mapping[str, int]) -> str | None:
    found = sorted(name for name in candidates if name in owner)
    return found[0] if found else None


def _apply(
    one: Any, plan: Plan, groups: Sequence[Any], state: Mapping[str, Any], saved_dtypes: Mapping[str, torch.dtype]
) -> None:
    raw = one.state_dict()
    owner = {name for group in groups for name in group.get("params", ())}
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for (index, found), live in zip(plan, raw["param_groups"], strict=True):
        values = {key: value for key, value in groups[index].items() if key != "params"}
        result["param_groups"].append({**values, "params": list(live["params"])})
        for key, name in zip(live["params"], found, strict=True):
            if name in state:
                result["state"][key] = dict(state[name])
    result["state"].update({key: value for key, value in state.items() if key not in owner})
    try:
        one.load_state_dict(result)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"The optimizer does not take the saved state: {error}") from error
    for parameter, name in _live_names(one, plan):
        if saved_dtypes.get(name) == parameter.dtype:
            _restore_dtypes(one.state.get(parameter), state.get(name))


def _live_names(one: Any, plan: Plan) -> Iterator[tuple[torch.Tensor, str]]:
    for (_, found), live in zip(plan, one.param_groups, strict=True):
        yield from zip(live["params"], found, strict=True)


def _restore_dtypes(live: Any, saved: Any) -> None:
    """Undo the cast of ``Optimizer.load_state_dict`` to the parameter's dtype: it rounds the moments."""
    if not isinstance(live, dict) or not isinstance(saved, Mapping):
        return
    for key, value in saved.items():
        now = live.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.dtype != now.dtype:
            live[key] = value.to(now.device)


def _state_dict(one: Any) -> Any:
    try:
        return one.state_dict()
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"The optimizer gives no state: {error}") from error


def _mismatch(what: str) -> CkptMirrorError:
    return UsageError(
        f"The optimizer does not match the save: {what}.",
        hint='Build the same optimizer, or load without it: exclude=("optimizer",).',
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(list(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
