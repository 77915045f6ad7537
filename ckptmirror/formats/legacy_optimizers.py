"""The optimizers in a legacy checkpoint: finds which groups of keys belong to the live optimizers.

Legacy writers kept AdamW under ``optimizer`` (or ``optim``), Muon under ``optimizer_1``, the histories of schedulers
under ``optimizer_2``. A list or a dict of several under one of these keys makes that many groups.

Rules:
* ``optimizer_key_counts`` are tried in order. The first count wins whose groups the live optimizers take completely,
  with each parameter once. The report names the groups that are left over.
* Parameters are matched by name. If the state is keyed by numbers, the numbers are positions, and they are trusted only
  if the saved model has the same parameters in the same order and every shape fits.
* In any doubt the optimizer starts without history, and the log says so: nothing is guessed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptmirror.core.containers import TreePath, changed, place
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.formats.names import live_parameters, match_names
from ckptmirror.formats.optimizer_state import is_state, optimizers_of, owners_of, parameters_by_key, plan_optimizer
from ckptmirror.formats.shards import spread

__all__ = ["Group", "find_optimizer", "groups_of", "is_optimizer_key", "joined", "optimizer_key_counts"]

# Groups of optimizer keys: AdamW, Muon and scheduler histories; AdamW and Muon; AdamW; none.
optimizer_key_counts = [3, 2, 1, 0]

_log = logging.getLogger("ckptmirror.legacy")
_KEY = re.compile(r"(?:optimizer|optim)s?(?:_([0-9]{1,3}))?", re.ASCII)


@dataclass(frozen=True)
class Group:
    """What one group of optimizer keys holds.

    Attributes:
        name: Its key in a dict of several; None if it was alone or in a list.
        state: As it was saved: an optimizer's state, or whatever else was put there.
    """

    name: str | None
    state: Any


def is_optimizer_key(key: str) -> bool:
    """Whether a key at the top of a checkpoint holds optimizers."""
    return _KEY.fullmatch(key) is not None


def groups_of(tree: Mapping[str, Any]) -> list[Group]:
    """Return the groups of optimizer keys at the top of a checkpoint, in order."""
    keys = [(int(match[1] or 0), key) for key in tree if (match := _KEY.fullmatch(key))]
    found: list[Group] = []
    for _, key in sorted(keys):
        value = tree[key]
        if isinstance(value, (list, tuple)):
            found += [Group(None, item) for item in value]
        elif isinstance(value, Mapping) and value and all(is_state(item) for item in value.values()):
            found += [Group(str(name), item) for name, item in value.items()]
        else:
            found.append(Group(None, value))
    return found


def joined(groups: Iterable[Group]) -> dict[str, Any] | None:
    """Join the state of several optimizers into one; None if there is none, or if they cannot be joined.

    Several states keyed by position each count from 0, so without the model's parameters they cannot be joined.
    """
    own = _states(groups)
    if not own:
        return None
    if len(own) > 1 and any(_is_positional(group) for group in own):
        _log.warning("optimizer: the %d states keyed by position cannot be told apart, so none is loaded", len(own))
        return None
    state: dict[Any, Any] = {}
    for group in own:
        state.update(group.get("state") or {})
    return {"state": state, "param_groups": [one for group in own for one in group["param_groups"]]}


def find_optimizer(
    groups: Sequence[Group], model: Mapping[str, Any], state: Any
) -> tuple[Mapping[str, Any] | str, list[str]]:
    """Find the saved state for the optimizers of ``state``, without changing anything.

    Args:
        groups: The groups of optimizer keys, at least one.
        model: The saved model.
        state: The ``TrainState`` that will be filled.

    Returns:
        The saved state by parameter name, or why none is loaded; and a line for each part that nothing here takes.
    """
    reasons: list[str] = []
    for count in (count for count in optimizer_key_counts if 0 < count <= len(groups)):
        own = [group for group in groups[:count] if is_state(group.state)]
        try:
            _check_no_doubt(_states(own), _states(groups))
            saved = _by_name(own, model, state)
            plan_optimizer(state.model, state.optimizer, saved)
        except CkptMirrorError as error:
            reasons.append(f"{count} of {len(groups)}: {error.message}")
            continue
        others = (place for place, group in enumerate(groups[:count], 1) if not is_state(group.state))
        left = [f"group {place} is not the state of an optimizer" for place in others]
        if count < len(groups):
            left.append(f"of {len(groups)} groups of optimizer keys the first {count} fit; the rest is left")
        return _fitted(saved, state.model), left
    return f"state that is clearly that of the optimizer here ({'; '.join(reasons)})", []


class _Doubt(CkptMirrorError):
    """It is not certain which state belongs to which parameter."""


def _check_no_doubt(taken: Sequence[Mapping[str, Any]], every: Sequence[Mapping[str, Any]]) -> None:
    """Check that no other group of the save could be meant instead."""
    if not taken:
        raise _Doubt("no group is the state of an optimizer.")
    _check_once(every)
    if len(taken) < len(every) and any(_is_positional(group) for group in every):
        raise _Doubt("the state is keyed by position, so it could belong to any of them.")


def _check_once(groups: Iterable[Mapping[str, Any]]) -> None:
    """Check that no parameter is in two groups by its name."""
    listed = [key for group in groups for key in _params(group) if isinstance(key, str)]
    if len(set(listed)) < len(listed):
        raise _Doubt("a parameter is in several groups of optimizer keys.")


def _by_name(groups: Sequence[Group], model: Mapping[str, Any], state: Any) -> dict[str, Any]:
    """Return the groups as one, by parameter name.

    Raises:
        _Doubt: The positions are ambiguous, or two of them name one parameter.
    """
    if any(_is_positional(group.state) for group in groups):
        live = optimizers_of(state.optimizer)
        if len(live) != len(groups):
            raise _Doubt(f"the save has {len(groups)} optimizers keyed by position, but the training has {len(live)}.")
        _check_order(model, state.model)
        _check_calls(groups, state.optimizer)
        pairs = zip(groups, live, strict=True)
        groups = [Group(group.name, _named(group.state, one, state.model)) for group, one in pairs]
    _check_once(group.state for group in groups)
    return joined(groups) or {}


def _check_order(saved: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Check that the saved model has the parameters of the live one, in the same order."""
    live = [name for name, _ in live_parameters(module)]
    there = [name for name in match_names(list(saved), live).values() if name in set(live)]
    if there != live:
        raise _Doubt("its state is keyed by position, and the parameters here differ or are in another order.")


def _check_calls(groups: Sequence[Group], optimizers: Any) -> None:
    """Check that optimizers that were saved by name have the same names here."""
    saved = [group.name for group in groups]
    live = [str(name) for name in optimizers] if isinstance(optimizers, Mapping) else [None] * len(saved)
    if saved != live:
        raise _Doubt("its state is keyed by position, and the optimizers have different names, or none on one side.")


def _check_param_names(params: Mapping[str, Any]) -> None:
    """Check that a group that lists parameter names (torch's ``param_names``) lists those here."""
    said = params.get("param_names")
    if said is None:
        return
    is_text = isinstance(said, (list, tuple)) and all(isinstance(one, str) for one in said)
    if not is_text or list(match_names(list(said), params["params"]).values()) != params["params"]:
        raise _Doubt("its state is keyed by position, and its names for the parameters differ from those here.")


def _named(group: Mapping[str, Any], one: Any, module: torch.nn.Module) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in reversed(list(live_parameters(module)))}
    state = group.get("state") or {}
    keyed = parameters_by_key(one, {**group, "state": state})
    if keyed is None:
        raise _Doubt("its state is keyed by position, and the parameters are grouped differently here.")
    by_key = {str(key): names[id(parameter)] for key, parameter in keyed.items() if id(parameter) in names}
    if len(by_key) < len(_params(group)):
        raise _Doubt("its state is keyed by position, and one position appears twice.")
    for key, parameter in keyed.items():
        _check_shapes(state.get(key, state.get(str(key))), key, parameter)
    groups = []
    for params in group["param_groups"]:
        groups.append({**params, "params": [by_key[str(key)] for key in params.get("params", ())]})
        _check_param_names(groups[-1])
    return {"state": {by_key.get(str(key), key): value for key, value in state.items()}, "param_groups": groups}


def _check_shapes(kept: Any, key: Any, parameter: torch.Tensor) -> None:
    """Check that elementwise state at a position has the shape of the parameter there."""
    for value in kept.values() if isinstance(kept, Mapping) else ():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
            raise _Doubt(f"its state is keyed by position, and that of position {key} has another shape.")


def _is_positional(group: Mapping[str, Any]) -> bool:
    return any(not isinstance(key, str) for key in _params(group))


def _params(group: Mapping[str, Any]) -> list[Any]:
    return [key for one in group["param_groups"] for key in one.get("params", ())]


def _fitted(saved: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return the state with full tensors sharded like the live parameters."""
    owners = owners_of(saved["state"], module)

    def sharded(leaf: Any, path: TreePath) -> Any:
        return spread(leaf, lambda: iter(()), owners.get(path[0]), place(saved["state"], path, "optimizer.state"))

    return {**saved, "state": changed(saved["state"], sharded)}


def _states(groups: Iterable[Group]) -> list[Any]:
    """Return the states of those groups that are an optimizer's."""
    return [group.state for group in groups if is_state(group.state)]
