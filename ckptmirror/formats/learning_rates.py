"""The learning rates after a load: an optimizer that was not loaded follows its scheduler that was.

Rules:
* A scheduler writes its rate into the optimizer's groups at each step, usually by scaling the current rate. If the
  scheduler was loaded but the optimizer was not, it would continue from the constructor's rate.
* An optimizer that was loaded keeps its rates, whatever its scheduler last set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ckptmirror.formats.containers import leaves

__all__ = ["follow_schedulers"]

_log = logging.getLogger("ckptmirror.formats")


def follow_schedulers(scheduler: Any, is_loaded: Callable[[Any], bool]) -> list[str]:
    """Set the rates of optimizer groups to those that their schedulers last set; return a line for each that changed.

    Args:
        scheduler: The loaded scheduler, or containers of schedulers.
        is_loaded: Whether an optimizer was loaded too.
    """
    lines = []
    for one in leaves(scheduler):
        optimizer, rates = getattr(one, "optimizer", None), getattr(one, "_last_lr", None)
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list) or not isinstance(rates, (list, tuple)) or is_loaded(optimizer):
            continue
        before = [group.get("lr") for group in groups]
        if len(groups) == len(rates) and _differ(before, rates):
            was, now = (", ".join(f"{float(rate):g}" for rate in each) for each in (before, rates))
            for group, rate in zip(groups, rates, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(float(rate))
                else:
                    group["lr"] = float(rate)
            lines.append(
                f"optimizer: it was not loaded, its learning rate is set from {was} to {now}, as the loaded scheduler "
                "has it"
            )
            _log.warning("%s", lines[-1])
    return lines


def _differ(before: list[Any], rates: Any) -> bool:
    try:
        return [float(rate) for rate in before] != [float(rate) for rate in rates]
    except (TypeError, ValueError):  # rates of a type of the user's own
        return False
