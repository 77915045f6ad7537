"""Optimizer state by parameter name: captured from live optimizers and loaded back into them.

Rules:
* Nothing here calls ``optimizer.step()``. The helpers in ``torch.distributed.checkpoint.state_dict`` fill an
  optimizer without state by a step with zero gradients: it counts as step 1, runs the step hooks and so changes the
  training that follows.
* The layout is theirs: ``{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}``, so either side
  reads the other's.
* If the mapping is not certain, that is an error that lists what differs; nothing is guessed.
* What was saved comes back exactly, in every container, and keeps its dtype; only where a parameter's dtype differs
  from the saved one's is floating-point state cast along with it. Tensors move to the parameter's device, ``step``
  where torch wants it.
* A DTensor in the state has the shape of its parameter, whose sharding a load follows.
* An optimizer elsewhere in the state (the user's extra) has no names: it keeps torch's layout, each parameter under its
  key. The dtype in which its parameters were saved is not known there, so its state is never cast. What is a plain
  tensor beside a sharded parameter stays one: which were sharded is kept beside the state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.containers import TreePath, changed
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError
from ckptmirror.core.name_rules import ALL_NAMES, NameRules
from ckptmirror.formats.names import live_parameters, match_names, some
from ckptmirror.formats.optimizer_check import (
    check_shards,
    is_split,
    not_in_model,
    refuse_local_state,
    refuse_more,
    refuse_second_owner,
    refuse_spread,
    refuse_strays,
    warn_of_shared_state,
)
from ckptmirror.formats.shards import Piece
from ckptmirror.formats.tensor_bytes import DEVICE_ERRORS
from ckptmirror.formats.weights_only_values import encode

__all__ = [
    "capture_optimizer",
    "is_state",
    "load_by_key",
    "load_optimizer",
    "optimizers_of",
    "owners_of",
    "parameters_by_key",
    "plan_optimizer",
    "sharded_like",
    "state_by_key",
]

_log = logging.getLogger("ckptmirror.formats")

_SHARDED = "sharded_parameters"
_SCALARS = (type(None), bool, int, float, complex)


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
        UsageError: An optimizer holds a parameter that is not the model's, or a value that a load could not give back.
    """
    live = list(live_parameters(model))
    names = {id(parameter): name for name, parameter in reversed(live)}
    parameters = dict(live)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    owners: dict[str, int] = {}
    optimizers = optimizers_of(optimizer)
    for number, one in enumerate(optimizers):
        raw = _state_dict(one)
        refuse_more(raw)
        by_key: dict[Any, str] = {}
        for index, (group, saved) in enumerate(zip(one.param_groups, raw["param_groups"], strict=True)):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if id(parameter) not in names:
                    raise not_in_model(parameter, index, group["params"])
                by_key[key] = names[id(parameter)]
                refuse_second_owner(by_key[key], owners, number)
                owners[by_key[key]] = number
            values = {k: encode(v, f"optimizer.param_groups[{index}].{k}") for k, v in saved.items() if k != "params"}
            check_shards(values, None, f"optimizer.param_groups[{index}]")
            groups.append({**values, "params": [by_key[key] for key in saved["params"]]})
        refuse_strays(one, raw["state"], by_key, names=parameters, several=len(optimizers) > 1)
        warn_of_shared_state(one, raw["state"], by_key)
        for key, value in raw["state"].items():
            name, where = by_key.get(key, key), f"optimizer.state.{by_key.get(key, key)}"
            parameter = parameters.get(name)
            if parameter is not None:
                refuse_local_state(value, parameter, where)
            state[name] = encode(dict(value) if isinstance(value, Mapping) else value, where)
            check_shards(state[name], parameter.shape if parameter is not None else None, where)
    return {"state": state, "param_groups": groups}


def owners_of(
    saved: Iterable[Any], model: torch.nn.Module, rules: NameRules = ALL_NAMES
) -> dict[Any, torch.nn.Parameter]:
    """Return the live parameter of each saved name that has one."""
    live = dict(live_parameters(model))
    new = {name: rules.renamed(name) for name in saved if isinstance(name, str)}
    matched = match_names(new.values(), live)
    return {name: live[matched[there]] for name, there in new.items() if matched[there] in live}


def is_state(saved: Any) -> bool:
    """Whether a saved value has the layout of an optimizer's state: groups that list names or positions."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, (list, tuple)) or not isinstance(saved.get("state"), Mapping | None):
        return False
    listed = [group.get("params", ()) if isinstance(group, Mapping) else None for group in groups]
    return all(isinstance(keys, (list, tuple)) and {*map(type, keys)} <= {str, int} for keys in listed)


Plan = list[tuple[int, list[str]]]


def plan_optimizer(
    model: torch.nn.Module,
    optimizer: Any,
    saved: Mapping[str, Any],
    elsewhere: frozenset[str] = frozenset(),
    rules: NameRules = ALL_NAMES,
) -> list[Plan]:
    """Map each optimizer's live groups to saved ones, changing nothing: (saved group, saved name per parameter).

    Args:
        model: The model.
        optimizer: One or several.
        saved: The saved state and groups.
        elsewhere: The names of the model's values that only other ranks hold; their parameters may be missing here.
        rules: Which parameters may be missing on one side.

    Raises:
        UsageError: The parameters are grouped differently in the save.
        IntegrityError: The save has no parameter groups.
    """
    if not is_state(saved):
        raise IntegrityError("The saved optimizer has no param_groups.")
    groups = saved["param_groups"]
    owner = {name: index for index, group in enumerate(groups) for name in group.get("params", ())}
    live = [(name, id(parameter)) for name, parameter in live_parameters(model)]
    matched = match_names(owner, [*(name for name, _ in live), *elsewhere])
    saved_name = {there: name for name, there in matched.items()}
    here = {name for name in owner if matched[name] not in elsewhere}
    aliases: dict[int, set[str]] = {}
    for name, identity in live:
        aliases.setdefault(identity, set()).add(saved_name.get(name, name))
    plans: list[Plan] = []
    position = 0
    for one in optimizers_of(optimizer):
        plans.append(_plan(one, aliases, groups, owner, here, position, rules))
        position += len(one.param_groups)
    used = {index for plan in plans for index, _ in plan}
    unused = [n for n, group in enumerate(groups) if n not in used and not here.isdisjoint(group.get("params", ()))]
    if unused and rules.strict:
        raise _mismatch(f"the save has parameter groups {unused} that the optimizer has not")
    return plans


def load_optimizer(
    optimizer: Any, plans: Sequence[Plan], saved: Mapping[str, Any], saved_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Load ``saved`` (in the layout of :func:`capture_optimizer`, sharded like the live parameters) into ``optimizer``.

    Args:
        optimizer: One or several.
        saved: The state and the parameter groups.
        plans: What :func:`plan_optimizer` returned.
        saved_dtypes: The dtype in which each parameter was saved, if known.

    Raises:
        UsageError: An optimizer does not take the state.
    """
    state = saved.get("state") or {}
    names = match_names([name for name in state if isinstance(name, str)], saved_dtypes)
    dtypes = {name: saved_dtypes[there] for name, there in names.items() if there in saved_dtypes}
    for one, plan in zip(optimizers_of(optimizer), plans, strict=True):
        _apply(one, plan, saved["param_groups"], state, dtypes)


def state_by_key(one: torch.optim.Optimizer, where: str) -> Any:
    """Return an optimizer's ``state_dict`` and which of its parameters are sharded; tensors are aliases.

    Raises:
        UsageError: It holds a DTensor that no load could shard again; the message names ``where``.
    """
    raw = _state_dict(one, where)
    keyed = parameters_by_key(one, raw)
    if keyed is not None:
        for key, value in raw["state"].items():
            check_shards(value, keyed[key].shape if key in keyed else None, f"{where}.state.{key}")
        check_shards(raw["param_groups"], None, f"{where}.param_groups")
        if sharded := [key for key, parameter in keyed.items() if is_split(parameter)]:
            return {**raw, _SHARDED: sharded}
    return raw


def parameters_by_key(one: torch.optim.Optimizer, state: Any) -> dict[Any, torch.Tensor] | None:
    """Return the live parameter for each key in ``state``; None if it has other groups or not torch's layout."""
    if not is_state(state) or state.get("state") is None or len(state["param_groups"]) != len(one.param_groups):
        return None
    keyed: dict[Any, torch.Tensor] = {}
    for live, group in zip(one.param_groups, state["param_groups"], strict=True):
        keys = group.get("params", ())
        if len(keys) != len(live["params"]):
            return None
        keyed.update(zip(keys, live["params"], strict=True))
    return keyed


def sharded_like(keyed: Mapping[Any, torch.Tensor], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree like ``saved`` that holds, for each tensor to shard, the parameter whose sharding it follows."""
    split = saved.get(_SHARDED) or ()

    def of_pieces(key: Any, parameter: torch.Tensor) -> Any:
        return changed(saved["state"].get(key), lambda leaf, _: parameter if isinstance(leaf, Piece) else None)

    return {"state": {key: of_pieces(key, one) if key in split else one for key, one in keyed.items()}}


def load_by_key(one: torch.optim.Optimizer, saved: Mapping[str, Any], where: str) -> None:
    """Replace the whole state of an optimizer with ``saved``, which :func:`parameters_by_key` could map.

    Raises:
        UsageError: It does not take it.
    """
    groups = saved["param_groups"]
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups", _SHARDED)}
    plan = [(index, list(group.get("params", ()))) for index, group in enumerate(groups)]
    _apply(one, plan, groups, saved["state"], {}, rest, where=where)


def _plan(
    one: Any,
    aliases: Mapping[int, set[str]],
    groups: Sequence[Any],
    owner: Mapping[str, int],
    here: set[str],
    start: int,
    rules: NameRules,
) -> Plan:
    plan: Plan = []
    for position, live in enumerate(one.param_groups, start):
        called = [aliases.get(id(parameter), set()) for parameter in live["params"]]
        known = [owner.keys() & of or (of if rules.may_lack(of) else set()) for of in called]
        names = [min(candidates, default=None) for candidates in known]
        if missing := [
            sorted(aliases.get(id(p), {"?"}))[0] for p, n in zip(live["params"], names, strict=True) if n is None
        ]:
            raise _mismatch(f"the save has no optimizer entry for {some(missing)}")
        found = [name for name in names if name is not None]
        indices = {owner[name] for name in found if name in owner}
        if not indices and position < len(groups) and not groups[position].get("params"):
            indices = {position}
        if len(indices) != 1:
            raise _mismatch(f"the parameters of group {position} are in {len(indices)} saved groups")
        index = indices.pop()
        extra = sorted(here.intersection(groups[index].get("params", ())).difference(found))
        if extra and rules.strict:
            raise _mismatch(f"saved group {index} also holds {some(extra)}")
        plan.append((index, found))
    return plan


def _apply(
    one: Any,
    plan: Plan,
    groups: Sequence[Any],
    state: Mapping[Any, Any],
    saved_dtypes: Mapping[str, torch.dtype],
    rest: Mapping[str, Any] | None = None,
    where: str = "optimizer",
) -> None:
    raw = one.state_dict()
    owner = {name for group in groups for name in group.get("params", ())}
    result: dict[str, Any] = {**(rest or {}), "state": {}, "param_groups": []}
    for (index, found), live in zip(plan, raw["param_groups"], strict=True):
        values = {key: value for key, value in groups[index].items() if key != "params"}
        result["param_groups"].append({**values, "params": list(live["params"])})
        for key, name in zip(live["params"], found, strict=True):
            if name in state:
                result["state"][key] = _hold(state[name])
    result["state"].update({key: value for key, value in state.items() if key not in owner})
    try:
        one.load_state_dict(result)
    except DEVICE_ERRORS:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"The {where} does not take the saved state: {error}") from error
    _refuse_another(one, raw["param_groups"], where)
    lacking = []
    parameters = [parameter for group in one.param_groups for parameter in group["params"]]
    for parameter, name in zip(parameters, (name for _, found in plan for name in found), strict=True):
        if parameter in one.state:
            cast = saved_dtypes.get(name, parameter.dtype) != parameter.dtype
            one.state[parameter] = _restore(one.state[parameter], state.get(name), parameter, cast=cast)
        elif state and parameter.requires_grad:
            lacking.append(str(name))
    if lacking:
        _log.warning("the save holds no %s state of %s, which restarts", where, some(lacking))


def _refuse_another(one: Any, before: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse the settings of an optimizer of another class: torch takes them, and only the next step fails.

    A setting that is missing after the load, with none that is new, is what a newer version of the same class adds.

    Raises:
        UsageError: The optimizer has lost settings that it needs, and got ones that it does not have.
    """
    needed = getattr(one, "defaults", None)
    if not isinstance(needed, Mapping):
        return
    for live, loaded in zip(before, one.param_groups, strict=True):
        lost, new = sorted(needed.keys() - loaded.keys()), sorted(loaded.keys() - live.keys())
        if lost and new:
            raise UsageError(
                f"The {where} was of another class when it was saved: {type(one).__name__} needs {some(lost)}, which "
                f"the save does not have; the save has {some(new)}.",
                hint='Use the optimizer of the save, or start with an empty one: exclude=("optimizer",).',
            )


class _Held:
    """Wraps a value so that ``Optimizer.load_state_dict`` passes it on unchanged: it damages text, arrays and lists."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _hold(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return _Held(state)
    return {
        key: value if isinstance(value, (torch.Tensor, *_SCALARS)) else _Held(value) for key, value in state.items()
    }


def _restore(now: Any, saved: Any, parameter: torch.Tensor, *, cast: bool) -> Any:
    """Return the live state of a parameter, each value as it was saved."""
    if isinstance(now, _Held):
        return _moved(now.value, parameter, cast=cast)
    for key, value in now.items() if isinstance(now, dict) else ():
        now[key] = _restored(value, saved.get(key) if isinstance(saved, Mapping) else None, parameter, cast=cast)
    return now


def _restored(value: Any, saved: Any, parameter: torch.Tensor, *, cast: bool) -> Any:
    """Return a live value unwrapped, not cast, and laid out like the parameter, as fused kernels expect."""
    if isinstance(value, _Held):
        value = _moved(value.value, parameter, cast=cast)
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(saved, torch.Tensor) and value.dtype != saved.dtype and not (cast and saved.is_floating_point()):
        value = saved.to(value.device)
    is_sharded = isinstance(value, DTensor) or isinstance(parameter, DTensor)
    if not is_sharded and value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return value


def _moved(value: Any, parameter: torch.Tensor, *, cast: bool) -> Any:
    """Return a saved value with the tensors in it on the parameter's device, in new containers."""

    def of_parameter(leaf: Any, path: TreePath) -> Any:
        if not isinstance(leaf, torch.Tensor) or path[-1:] == ("step",):
            return leaf
        return leaf.to(parameter.device, parameter.dtype if cast and leaf.is_floating_point() else leaf.dtype)

    return changed(value, of_parameter)


def _state_dict(one: Any, where: str = "optimizer") -> Any:
    refuse_spread(one, where)
    try:
        return one.state_dict()
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"The {where} gives no state: {error}", hint="Its state_dict() has to work on every rank at every save()."
        ) from error


def _mismatch(what: str) -> CkptMirrorError:
    return UsageError(
        f"The optimizer does not match the save: {what}.",
        hint='Build the same optimizer, or load without it: exclude=("optimizer",).',
    )
