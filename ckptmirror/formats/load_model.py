"""Into live objects: giving loaded values back to a model, strictly and in place.

Rules:
* Names, shapes and kinds of values are compared before the first value is copied, so a wrong checkpoint does not change
  the model.
* Values that a module sizes by its data (extra state, the buffers of observers) are passed to it as they were saved.
* Values are copied into the existing tensors, shard by shard, without talking to other ranks; the model's own
  ``load_state_dict`` runs at the end, with the versions that the modules were saved in, so its hooks and extra state
  are honoured.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.core.name_rules import ALL_NAMES, NameRules
from ckptmirror.formats.already_filled import overlaps_itself
from ckptmirror.formats.names import clean_names, live_values, makes_room, match_names, some
from ckptmirror.formats.shards import Piece, fill_all, fills, region_of, stored
from ckptmirror.formats.tensor_bytes import DEVICE_ERRORS
from ckptmirror.formats.tied_weights import refuse_two_values
from ckptmirror.formats.versions import Versions, attached, for_live, migrating

__all__ = ["Check", "load_model", "plan_model"]

log = logging.getLogger(__name__)

Others = Callable[[str], Iterable[Any]]
Check = Callable[[str, str, torch.Tensor, Iterable[Piece]], None]


def _check_fits(name: str, shape: tuple[int, ...] | None, live: Any, *, is_free: bool = False) -> bool:
    """Compare one saved value (``shape``: None for a value that is not a tensor) with the live one.

    Args:
        name: For messages.
        shape: Of the saved tensor.
        live: The live value.
        is_free: Whether the module accepts another shape than the live value's (``names.makes_room``).

    Returns:
        Whether it can be copied into the live tensor.

    Raises:
        UsageError: They do not fit; the message names both shapes.
    """
    here = tuple(live.shape) if isinstance(live, torch.Tensor) else None
    if (shape != here and is_free) or (shape is None and here is None):
        return False
    if shape is None or here is None:
        raise UsageError(f"{name} is a tensor on one side only: in the checkpoint or in the model.")
    if shape != here:
        raise UsageError(
            f"{name} has the shape {shape} in the checkpoint and {here} in the model.",
            hint="Build the model with the configuration that the meta names (its `training_config`).",
        )
    if live.is_meta:
        raise UsageError(
            f"{name} is on the meta device.", hint='Call model.to_empty(device="cpu") (or "cuda") before loading.'
        )
    if overlaps_itself(live):
        raise UsageError(
            f"{name} has several values at one place in memory, as an expanded tensor has: it cannot be filled.",
            hint="Give it memory of its own (`.clone()`) where the model is built.",
        )
    return True


def load_model(
    module: torch.nn.Module,
    saved: Mapping[str, Any],
    others: Others = lambda _: (),
    check: Check | None = None,
    versions: Versions | None = None,
    elsewhere: frozenset[str] = frozenset(),
) -> dict[str, torch.dtype]:
    """Load ``saved`` into ``module``; return the dtypes by saved name. See :func:`plan_model`."""
    return plan_model(module, saved, others, check, versions, elsewhere)()


def plan_model(
    module: torch.nn.Module,
    saved: Mapping[str, Any],
    others: Others = lambda _: (),
    check: Check | None = None,
    versions: Versions | None = None,
    elsewhere: frozenset[str] = frozenset(),
    rules: NameRules = ALL_NAMES,
    say: Callable[[str], None] = log.warning,
) -> Callable[[], dict[str, torch.dtype]]:
    """Compare ``saved`` with ``module``, and return a function that loads it and returns the dtypes by saved name.

    Args:
        module: The live model, however it is wrapped or sharded.
        saved: Tensors, pieces, plain values and what is not read yet, by name; if needed, names are matched without the
            prefixes of wrappers.
        others: Returns the values of a saved name in the other ranks' files, read only if this rank's do not suffice.
        check: Called for each tensor that will be filled, before any is: name, saved name, live tensor and values. It
            raises if the tensor must not be filled.
        versions: The layout versions of the modules when they were saved; None if the save does not have them.
        elsewhere: The names that only other ranks hold; the checkpoint may have them too.
        rules: Which names are loaded, and under which names.
        say: Called with a line for the names that are not loaded.
    """
    live = live_values(module)
    names, lines = rules.pair(saved, live, elsewhere, match_names)
    versions = _versions_for(module, live, names, versions) if rules != ALL_NAMES else versions
    wanted = {name: value for name, value in live.items() if name in names}
    items = {name: stored(saved[there], functools.partial(others, there)) for name, there in names.items()}
    is_free = makes_room(module)
    in_place = {
        name: value
        for name, value in wanted.items()
        if _check_fits(name, items[name].shape, value, is_free=is_free(name) and not items[name].is_cut)
    }
    for name in in_place:
        held = items[name].held
        if held is not None and not fills(held.data):
            what = f"a tensor of layout {held.data.layout} on {held.data.device}"
            raise UsageError(f"{name} is {what} in the checkpoint, which has no values to copy from.")
    refuse_two_values(in_place, items)
    if check is not None:
        for name, value in in_place.items():
            check(name, names[name], value, items[name].pieces(region_of(value)))

    def load() -> dict[str, torch.dtype]:
        fill_all([(value, items[name].pieces, name) for name, value in in_place.items()])
        for line in lines:
            say(line)
        loaded = {name: items[name].read() if name in items and name not in in_place else live[name] for name in live}
        dtypes = {name: items[name].dtype for name, value in wanted.items() if isinstance(value, torch.Tensor)}
        if cast := [name for name, dtype in dtypes.items() if dtype not in (None, live[name].dtype)]:
            log.warning("%d tensors were converted to the model's dtype: %s", len(cast), some(cast))
        if loaded:
            _give(module, loaded, live.metadata, versions)
        return {rules.renamed(names[name]): dtype for name, dtype in dtypes.items() if dtype is not None}

    return load


def _versions_for(
    module: torch.nn.Module, live: Any, names: Mapping[str, str], versions: Versions | None
) -> Versions | None:
    """Return the versions under the live names of the modules; of those that are not loaded, the live ones."""
    if versions is None:
        return None
    of = {name.rpartition(".")[0]: there.rpartition(".")[0] for name, there in names.items()}
    left = {name.rpartition(".")[0] for name in live if name not in names} - of.keys()
    clean = clean_names(module)
    own = {clean(name): values for name, values in (live.metadata or {}).items() if clean(name) in left}
    return {**versions, **{name: versions[there] for name, there in of.items() if there in versions}, **own}


def _give(module: torch.nn.Module, loaded: dict[str, Any], own: Any, versions: Versions | None) -> None:
    """Pass values that are already in place to the module's own ``load_state_dict``, strictly.

    Raises:
        UsageError: It does not take them; the message quotes its error and names the module that raised it.
    """
    metadata = for_live(module, own, versions)
    changes = migrating(module, own, metadata)
    given = {
        name: value.clone() if isinstance(value, torch.Tensor) and changes(name) else value
        for name, value in loaded.items()
    }  # else a module would change what it reads from as it writes
    try:
        set_model_state_dict(module, attached(given, metadata), options=StateDictOptions(strict=True))
    except (CkptMirrorError, *DEVICE_ERRORS):
        raise
    except Exception as error:  # a module's own code may raise anything; the answer is the same
        raise UsageError(
            f"{_raised_in(module, error)} does not take the checkpoint: {type(error).__name__}: {error}",
            hint="Build the model as it was when it was saved.",
        ) from error


def _raised_in(module: torch.nn.Module, error: BaseException) -> str:
    """Return the name and the class of the innermost module whose code raised ``error``."""
    names = {id(part): name for name, part in module.named_modules()}
    found = "The model"
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        first = trace.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, torch.nn.Module) and names.get(id(first)):
            found = f"The model's {names[id(first)]}, a {type(first).__qualname__},"
        trace = trace.tb_next
    return found
