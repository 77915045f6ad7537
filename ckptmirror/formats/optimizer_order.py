"""The order of an optimizer's parameter groups: its state is saved by name, but a scheduler keeps rates by position.

Rules:
* Groups, or optimizers in a list, may be in another order than they were saved in, unless a scheduler would then get
  the rates of other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptmirror.core.errors import UsageError

__all__ = ["refuse_other_order"]


def refuse_other_order(
    plans: Sequence[Sequence[tuple[int, Any]]], saved: Mapping[str, Any], is_scheduled: Callable[[], bool]
) -> None:
    """Refuse groups in another order than they were saved in, where a scheduler will be loaded.

    Args:
        plans: For each optimizer and each of its groups, the position among the saved groups.
        saved: The saved optimizer.
        is_scheduled: Returns whether a scheduler will be loaded; called only if the order differs.

    Raises:
        UsageError: The order differs; the message lists both orders.
    """
    order = [index for plan in plans for index, _ in plan]
    if order == list(range(len(order))) or not is_scheduled():
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
