"""Loads the model and the optimizer of a save of any kind: all is compared before anything changes.

Rules:
* First the model is compared, then the classes of optimizers and schedulers, then the optimizer, which is read for
  that. Only then is anything loaded. So what does not fit changes nothing, and the error names the cause: where the
  model is another one, its optimizer does not fit either.
* Groups, or optimizers in a list, may be in another order than they were saved in, unless a scheduler would then get
  the rates of other groups: an optimizer's state is saved by name, but a scheduler keeps rates by position.
* What each rank has of its own (``core.per_rank``) takes the place of what the kind has under these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckptmirror.core.command_changes import Command, refuse_other_classes
from ckptmirror.core.containers import any_leaf, changed, takes_state
from ckptmirror.core.errors import UsageError
from ckptmirror.core.name_rules import ALL_NAMES
from ckptmirror.core.per_rank import matching, own_for
from ckptmirror.formats.base import LoadReport, LoadTarget, Missing
from ckptmirror.formats.command import KEY as COMMAND
from ckptmirror.formats.command import command_of
from ckptmirror.formats.names import live_values, match_names, some
from ckptmirror.formats.optimizer_state import is_state, load_optimizer, optimizers_of, plan_optimizer
from ckptmirror.formats.rank_files import Copies

__all__ = ["load_parts"]


def load_parts(
    target: LoadTarget,
    *,
    model: Callable[[Mapping[str, Any]], Callable[[], Mapping[str, torch.dtype]]],
    optimizer: Callable[[], Mapping[str, Any] | str] | None,
    extra: Callable[[], Any],
) -> LoadReport:
    """Load what the target wants of model and optimizer, and report what the save lacks.

    Args:
        target: What to fill.
        model: Compares the model, given the rank's own values; returns a function that loads it and returns the dtype
            of each tensor in the save.
        optimizer: Returns the saved optimizer, sharded like the live one, or why none is loaded; None if the save has
            none.
        extra: Returns the extra state that is loaded after these, as this rank's file has it; None if there is none.

    Raises:
        IntegrityError: A file is missing, broken or hostile.
        UsageError: Model or optimizer do not fit, or only one side has an optimizer and the target does not allow it.
    """
    state = target.state
    loaded: list[str] = []
    missing = Missing()
    saved: Mapping[str, Any] | str = ""
    dtypes: Mapping[str, torch.dtype] = {}
    fill: Callable[[], Mapping[str, torch.dtype]] | None = None
    order: list[int] | None = None
    groups: tuple[Mapping[str, Any], ...] = ()
    beside = extra()
    own = own_for(target, beside)
    if "model" not in target.exclude:
        fill = model(own.model if own is not None else {})
    here = set(match_names(own.names, live_values(state.model)).values()) if own is not None else set()
    if own is not None:
        own.refuse_other_names(live_values(state.model), here)
    command = beside.get(COMMAND) if isinstance(beside, Mapping) else None
    refuse_other_classes(command, command_of(state, as_built=True), target.exclude)
    if "optimizer" not in target.exclude and state.optimizer is not None:
        live_values(state.model)  # asked for its state, FSDP2 reshards what a forward without a backward left unsharded
        saved = optimizer() if optimizer is not None else "state"
        if isinstance(saved, str) and not target.allow_cold_optimizer:
            raise _cold("The save has no state of an optimizer, and this command has one: it would lose its history.")
        if isinstance(saved, str):
            missing.lacks("optimizer", f"{saved}; it starts without history")
        else:
            if own is not None and own.is_here:
                copies = Copies()
                held = changed(own.optimizer, lambda value, _: copies.copy(value))
                saved = {**saved, "state": own.state_of(saved.get("state") or {}, held)}
            saved = target.rules.optimizer(saved) if target.rules != ALL_NAMES and is_state(saved) else saved
            plans = plan_optimizer(state.model, state.optimizer, saved, target.elsewhere, target.rules)
            is_scheduled = _takes_schedule(target, beside)
            _refuse_other_order(plans, saved, is_scheduled=is_scheduled, some_elsewhere=bool(target.elsewhere))
    elif "optimizer" not in target.exclude and optimizer is not None:
        if not target.allow_cold_optimizer:
            raise _cold("The save has the state of an optimizer, and this command has none: it would be lost.")
        missing.unused("optimizer")
    if fill is not None:
        dtypes = fill()
        loaded.append("model")
        names = matching(state.per_rank, live_values(state.model)) if state.per_rank else []
        if shared := [name for name in names if name not in here]:
            missing.say(f"model: the save has one value for all ranks of {some(shared)}, which per_rank matches")
    if not isinstance(saved, str):
        load_optimizer(state.optimizer, plans, saved, dtypes)
        loaded.append("optimizer")
        order = [index for plan in plans for index, _ in plan]
        groups = tuple(saved["param_groups"][index] for index in order)
        order = list(range(len(order))) if target.elsewhere else order  # of this stage's own groups, beside it
    return LoadReport(tuple(loaded), (*target.left, *missing), Command.parse(command, order), groups=groups)


def _cold(why: str) -> UsageError:
    hint = "Pass the state as it was, TrainState(optimizer=...), or go on without: resume(allow_cold_optimizer=True)."
    return UsageError(why, hint=hint)


def _takes_schedule(target: LoadTarget, extra: Any) -> bool:
    """Whether ``extra`` has the state of a scheduler of the target, which may also be in the user's extra."""
    if not isinstance(extra, dict):
        return False
    state, exclude = target.state, target.exclude
    known = optimizers_of(state.optimizer)

    def follows(value: Any) -> bool:
        return takes_state(value) and any(getattr(value, "optimizer", None) is one for one in known)

    if "extra" not in exclude and "extra" in extra and any_leaf(state.extra, follows):
        return True
    return "scheduler" not in exclude and state.scheduler is not None and "scheduler" in extra


def _refuse_other_order(
    plans: Sequence[Sequence[tuple[int, Any]]], saved: Mapping[str, Any], *, is_scheduled: bool, some_elsewhere: bool
) -> None:
    """Refuse groups in another order than they were saved in, where a scheduler will be loaded.

    Groups may be missing where other ranks hold some of the parameters.

    Raises:
        UsageError: The order differs; the message lists both orders.
    """
    order = [index for plan in plans for index, _ in plan]
    in_order = sorted(order) if some_elsewhere else list(range(len(order)))
    if order == in_order or not is_scheduled:
        return
    groups = [_title(group, index) for index, group in enumerate(saved["param_groups"])]
    raise UsageError(
        "The optimizer's parameter groups are not in the order in which they were saved, and a scheduler goes by the "
        f"order. Saved: {'; '.join(groups)}. Here: {'; '.join(groups[index] for index in order)}.",
        hint='Build them in the saved order, or load without the scheduler: exclude=("scheduler",).',
    )


def _title(group: Mapping[str, Any], index: int) -> str:
    name = group.get("name")
    params = [str(param) for param in group.get("params", ())]
    held = params[0] + (f" and {len(params) - 1} more" if len(params) > 1 else "") if params else "empty"
    return f"{index}: {name} ({held})" if isinstance(name, str) else f"{index}: {held}"
