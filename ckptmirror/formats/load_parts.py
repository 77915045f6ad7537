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

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptmirror.core.command_changes import Command, refuse_other_classes, refuse_other_order
from ckptmirror.core.containers import any_leaf, changed, takes_state
from ckptmirror.core.errors import UsageError
from ckptmirror.core.name_rules import ALL_NAMES
from ckptmirror.core.per_rank import RankExtras, ValueTools, matching, own_for
from ckptmirror.formats.already_filled import same
from ckptmirror.formats.base import LoadReport, LoadTarget, Missing
from ckptmirror.formats.command import KEY as COMMAND
from ckptmirror.formats.command import command_of
from ckptmirror.formats.names import live_values, match_names, some
from ckptmirror.formats.optimizer_state import is_state, load_optimizer, optimizers_of, plan_optimizer
from ckptmirror.formats.rank_files import Copies
from ckptmirror.formats.shards import stored

__all__ = ["OWN_VALUES", "OwnValues", "load_parts"]

OwnValues = Callable[[Mapping[str, Any]], Mapping[str, Any]]
OWN_VALUES = ValueTools(lambda value: stored(value).read(), same)


def load_parts(
    target: LoadTarget,
    *,
    model: Callable[[OwnValues], Callable[[], Mapping[str, torch.dtype]]],
    optimizer: Callable[[], Mapping[str, Any] | str] | None,
    extra: RankExtras,
) -> LoadReport:
    """Load what the target wants of model and optimizer, and report what the save lacks.

    Args:
        target: What to fill.
        model: Compares the model, given what returns the rank's own values for those of the kind; returns a function
            that loads it and returns the dtype of each tensor in the save.
        optimizer: Returns the saved optimizer, sharded like the live one, or why none is loaded; None if the save has
            none.
        extra: The extra state that is loaded after these.

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
    beside = extra.first
    own = own_for(target, extra, OWN_VALUES)
    live = live_values(state.model)
    new = {name: target.rules.renamed(name) for name in (own.names if own is not None else ())}
    at = match_names(new.values(), live)
    like = {name: live.get(at[there]) for name, there in new.items()}
    held = {*live, *target.elsewhere}
    here = {name for name in at.values() if name in held or not target.rules.may_lack([name])}
    if "model" not in target.exclude:
        fill = model(lambda shared: own.values(shared, like) if own is not None else {})
    if own is not None:
        is_renamed = any(target.rules.renamed(name) != name for name in own.names_of_all)
        kept, wanted = ([name for name in names if not target.rules.leaves(name)] for names in (live, here))
        own.refuse_other_names(kept, wanted, is_renamed=is_renamed)
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
                moments = own.moments(saved.get("state") or {}, like)
                held = changed(moments, lambda value, _: copies.copy(value))
                saved = {**saved, "state": own.state_of(saved.get("state") or {}, held)}
            saved = target.rules.optimizer(saved) if target.rules != ALL_NAMES and is_state(saved) else saved
            plans = plan_optimizer(state.model, state.optimizer, saved, target.elsewhere, target.rules)
            is_scheduled = _takes_schedule(target, beside)
            refuse_other_order(plans, saved, is_scheduled=is_scheduled, some_elsewhere=bool(target.elsewhere))
    elif "optimizer" not in target.exclude and optimizer is not None:
        if not target.allow_cold_optimizer:
            raise _cold("The save has the state of an optimizer, and this command has none: it would be lost.")
        missing.unused("optimizer")
    target.before_change()
    if fill is not None:
        dtypes = fill()
        loaded.append("model")
        names = matching(state.per_rank, live_values(state.model)) if state.per_rank else []
        if shared := [name for name in names if name not in here and not target.rules.leaves(name)]:
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
