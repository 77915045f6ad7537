"""Asks the objects of a state, after a load, for what they were given: settings, counters, rates.

Tensors have fingerprints (``loaded_check``). An object with ``load_state_dict`` may also ignore a number, and nothing
shows it until the schedule or the scale is another one.

Rules:
* Each is compared before anything else changes it: groups of optimizers before a scheduler is loaded, all objects
  before the settings of the command (``command_wins``) are set. Groups of an emergency snapshot are not.
* Schedulers, gradient scalers and groups of optimizers are torch's: they return what they were given, so a difference
  is an error. Objects of other classes may have reasons: a difference is a warning, and those that do not return the
  same twice are not compared.
* Not asked are modules and optimizers (their tensors are compared), and what is iterated over: a data loader or a
  sampler may take its state only when it begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmirror.core.errors import LoadDiffers
from ckptmirror.core.taken_state import not_taken

if TYPE_CHECKING:
    from ckptmirror.formats.train_state import TrainState

__all__ = ["check_groups", "check_objects", "warn_of_objects"]

_log = logging.getLogger("ckptmirror.load")
_PARTS = ("scheduler", "scaler", "ema", "extra")
_OF_TORCH = ("torch.optim.lr_scheduler", "torch.amp.grad_scaler")
_COMPARED_ELSEWHERE = ("torch.nn.modules.module", "torch.optim.optimizer", "torch._C")
_NAMED = 8


def check_groups(state: TrainState, groups: Sequence[Mapping[str, Any]]) -> None:
    """Compare the settings in the groups of the optimizers with those that were loaded.

    Args:
        state: The live state.
        groups: The saved groups, of the live ones in order.

    Raises:
        LoadDiffers: An optimizer did not take one; names it.
    """
    from ckptmirror.formats.optimizer_state import optimizers_of

    live = [group for one in optimizers_of(state.optimizer) for group in one.param_groups]
    found: list[str] = []
    for index, (saved, now) in enumerate(zip(groups, live, strict=False)):
        shared = {key: value for key, value in saved.items() if key in now and key not in ("params", "param_names")}
        found += map(_text, not_taken(shared, now, f"optimizer.param_groups[{index}]"))
    _refuse(found)


def check_objects(state: TrainState, loaded: Sequence[str], saved: Any) -> None:
    """Compare what the schedulers and gradient scalers of a state return with what was loaded into them.

    Args:
        state: The live state.
        loaded: The parts that were loaded.
        saved: The extra state that this rank loaded.

    Raises:
        LoadDiffers: One did not take a value; names it.
    """
    found: list[str] = []
    for where, one, given in _objects(state, loaded, saved):
        if _is_of(one, _OF_TORCH):
            found += map(_text, not_taken(given, _state_of(one), where))
    _refuse(found)


def warn_of_objects(state: TrainState, loaded: Sequence[str], saved: Callable[[], Any]) -> None:
    """Warn of objects of other classes that do not return what was loaded into them; see :func:`check_objects`.

    Call it when all ranks have loaded: a ``state_dict()`` may talk to the other ranks. Nothing is raised.
    """
    try:
        for where, one, given in _objects(state, loaded, saved()):
            if not _is_of(one, _OF_TORCH):
                _warn_of(where, one, given)
    except Exception as error:  # noqa: BLE001 - the user's objects may do anything; one rank must not stop alone by it
        _log.debug("what was loaded into the objects of the state could not be compared: %s", error)


def _warn_of(where: str, one: Any, given: Any) -> None:
    first = _state_of(one)
    differences = [_text(each) for each in not_taken(given, first, where)]
    if differences and not any(not_taken(first, _state_of(one), where)):
        _log.warning(
            "%s (%s) does not return what was loaded into it: %s. Look at its load_state_dict(): the run goes on with "
            "what it has.",
            where,
            type(one).__name__,
            "; ".join(differences[:_NAMED]),
        )


def _objects(state: TrainState, loaded: Sequence[str], saved: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place of each object that can be asked, the object, and the state that was loaded into it."""
    from ckptmirror.core.containers import has, item_at, place, placed_leaves

    merged = {("extra", key) for key in state.merge_extra or {}}
    for part in _PARTS if isinstance(saved, Mapping) else ():
        objects = getattr(state, part) if part in loaded else None
        for path, one in placed_leaves(objects):
            may_merge = part == "ema" and isinstance(state.per_rank, Mapping)  # where the number of ranks has changed
            is_merged = may_merge or has(one, "merge_state_dicts") or (part, *path)[:2] in merged
            is_asked = has(one, "state_dict") and has(one, "load_state_dict") and not is_merged
            is_iterated = has(one, "__iter__") or has(one, "__next__")
            given = item_at(saved.get(part), path)
            if is_asked and not is_iterated and not _is_of(one, _COMPARED_ELSEWHERE) and given is not None:
                yield place(objects, path, part), one, given


def _state_of(one: Any) -> Any:
    try:
        return one.state_dict()
    except Exception as error:  # noqa: BLE001 - the next save raises it, by name; the load went well
        _log.debug("%s was loaded and gives no state: %s", type(one).__name__, error)
        return None


def _is_of(one: Any, modules: Sequence[str]) -> bool:
    return any(base.__module__.startswith(tuple(modules)) for base in type(one).__mro__)


def _text(difference: tuple[str, Any, Any]) -> str:
    at, given, returned = difference
    return f"{at} is {_short(returned)}, {_short(given)} was loaded"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse(found: Sequence[str]) -> None:
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise LoadDiffers(f"After the load, not everything is what was saved: {'; '.join(found[:_NAMED])}{more}.")
