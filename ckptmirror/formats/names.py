"""Names of parameters and buffers without the prefixes that wrappers add.

Rules:
* On save, and for the live model, torch's own traversal gives the names: it removes ``module.`` and ``_orig_mod.`` only
  where a wrapper added them. It runs again only when the model's own names change, since it takes longer than anything
  else on the training thread.
* Names from a file are first matched exactly. Only if that fails, both sides are compared without wrapper prefixes, and
  only if the result is unambiguous.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ckptmirror.core.errors import UsageError

__all__ = ["bare", "clean_names", "live_parameters", "live_values", "makes_room", "match_names", "own_loaders", "some"]

_PREFIX = "module"
_CHECKPOINTED = "_checkpoint_wrapped_module"
_KNOWN: WeakKeyDictionary[torch.nn.Module, dict[str, str]] = WeakKeyDictionary()  # clean name by own name
_ANYWHERE = ("_orig_mod", _CHECKPOINTED, "_fsdp_wrapped_module")


class LiveValues(dict[str, Any]):
    """The values of a model by clean name, and the layout versions of its modules by their own names."""

    metadata: Any = None


def live_values(model: torch.nn.Module) -> LiveValues:
    """Return the model's persistent tensors and extra state by clean name; tensors are aliases of the live ones."""
    is_patched = "state_dict" in vars(model)  # for example by torch, to copy or to gather; its helper handles that
    state = get_model_state_dict(model) if is_patched else model.state_dict()
    names = _KNOWN.get(model, {}) if not is_patched else {name: name for name in state}
    if names.keys() != state.keys():
        clean = clean_names(model)
        names = {name: clean(name) for name in state}
        by_torch = get_model_state_dict(model)
        if by_torch.keys() == set(names.values()):
            _KNOWN[model] = names
        else:
            names, state = {name: name for name in by_torch}, by_torch
    values = LiveValues((names[name], value) for name, value in state.items())
    values.metadata = getattr(state, "_metadata", None)
    if lazy := [name for name, value in values.items() if isinstance(value, torch.Tensor) and is_lazy(value)]:
        raise UsageError(
            f"{lazy[0]} is a lazy parameter or buffer that has no shape yet.",
            hint="Run one forward pass through the model before save() or resume(): that makes it.",
        )
    return values


def live_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every parameter under each of its clean names (a tied one more than once)."""
    clean = clean_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield clean(name), parameter


def makes_room(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function that says, for a clean name, whether its module accepts the value in another shape.

    Extra state may be anything. Observers and fake quantizers size their buffers by the data that they have seen, and
    resize them for a checkpoint in their own ``_load_from_state_dict``. Parameters always have to fit.
    """
    own = set(own_loaders(model).values())
    parameters = {name for name, _ in live_parameters(model)}

    def answer(name: str) -> bool:
        owner, _, last = name.rpartition(".")
        return last == "_extra_state" or (owner in own and name not in parameters)

    return answer


def own_loaders(model: torch.nn.Module) -> dict[str, str]:
    """Return the clean name of each module whose code reads its values in a way of its own, by its own name."""
    clean, plain = clean_names(model), torch.nn.Module._load_from_state_dict
    modules = model.named_modules(remove_duplicate=False)
    return {name: clean(name) for name, module in modules if type(module)._load_from_state_dict is not plain}


def clean_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of the model's wrappers from the name of a value or a module."""
    outermost: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # outermost first
        outermost.setdefault(_without_checkpointing(name), module)
    wrappers = {name for name, module in outermost.items() if _wraps(module)}
    return lambda name: _without_wrappers(_without_checkpointing(name), wrappers)


def _wraps(module: torch.nn.Module) -> bool:
    compiled = sys.modules.get("torch._dynamo.eval_frame")  # imported, if anything was compiled
    kinds = (DistributedDataParallel,) if compiled is None else (DistributedDataParallel, compiled.OptimizedModule)
    return isinstance(module, kinds)


def _without_checkpointing(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _CHECKPOINTED)


def _without_wrappers(name: str, wrappers: set[str]) -> str:
    """Remove wrapper prefixes; one inside a checkpointing wrapper stays, because torch leaves it there too."""
    parts = name.split(".")
    kept = [
        part
        for index, part in enumerate(parts)
        if part not in (_PREFIX, "_orig_mod") or ".".join(parts[:index]) not in wrappers
    ]
    return ".".join(kept)


def bare(name: str) -> str:
    """Return ``name`` without any part that a wrapper may have added."""
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == _PREFIX:
        parts = parts[1:]
    return ".".join(parts)


def match_names(saved: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """Return the live name for each saved name (the saved name itself if nothing matches)."""
    saved, live = list(saved), list(live)
    if set(saved) == set(live):
        return {name: name for name in saved}
    by_bare: dict[str, str | None] = {}
    for name in live:
        by_bare[bare(name)] = None if bare(name) in by_bare else name
    known = set(live)
    taken = known.intersection(saved)
    result: dict[str, str] = {}
    for name in saved:
        match = name if name in known else by_bare.get(bare(name))
        result[name] = match if match is not None and (match == name or match not in taken) else name
        taken.add(result[name])
    return result


def some(names: Iterable[Any]) -> str:
    """Return a text with the first few names and the number of the others."""
    first, rest = (listed := list(names))[:5], listed[5:]
    return ", ".join(map(str, first)) + (f" and {len(rest)} more" if rest else "")
