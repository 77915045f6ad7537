"""The layout versions of modules: ``_version`` and the like, which a module uses to migrate older state.

torch keeps them as ``_metadata`` of a ``state_dict()``. Without them a module assumes the oldest layout, and would
change new weights.

Rules:
* They are saved under the clean names of the modules, as JSON text; in ``model_*.pt`` they are ``_metadata`` itself.
* Whatever the file, only numbers and text are passed to a module.
* If a save has none, it is assumed to have the versions of the live modules.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.names import bare, clean_names, own_loaders

__all__ = [
    "KEY",
    "Versions",
    "attached",
    "checked",
    "clean_versions",
    "for_live",
    "from_text",
    "is_plain",
    "migrating",
    "plain_model",
    "to_text",
    "versions_in",
]

KEY = "module_versions"
Versions = dict[str, dict[str, Any]]

_TYPES = (type(None), bool, int, float, str)
_log = logging.getLogger("ckptmirror.formats")


def clean_versions(model: torch.nn.Module, metadata: Any) -> Versions | None:
    """Return ``metadata`` of the model's own state under clean names; of a wrapper, only what it wraps."""
    if not isinstance(metadata, Mapping):
        return None
    clean = clean_names(model)
    return {clean(name): _plain(values, name) for name, values in metadata.items()}  # from the outside to the inside


def for_live(model: torch.nn.Module, metadata: Any, saved: Versions | None) -> Mapping[str, Any] | None:
    """Return the ``_metadata`` to load a state with: the saved versions, under the live modules' names.

    Args:
        model: The model that loads the state.
        metadata: The ``_metadata`` of its own state.
        saved: The saved versions by clean name; None if the save has none.
    """
    own = metadata if isinstance(metadata, Mapping) else None
    if saved is None:
        return own
    names = list(own) if own is not None else [name for name, _ in model.named_modules(remove_duplicate=False)]
    clean = clean_names(model)
    innermost = {clean(name): name for name in names}
    without_marks = {_bare(name): values for name, values in saved.items()}
    result = {}
    for name in names:
        here = clean(name)
        if innermost[here] == name:
            result[name] = dict(saved.get(here, without_marks.get(_bare(here), {})))
        else:
            result[name] = dict((own or {}).get(name, {}))
    return result


def migrating(model: torch.nn.Module, now: Any, given: Mapping[str, Any] | None) -> Callable[[str], bool]:
    """Return a function that says, for a clean name, whether its module may migrate the value from another version."""
    own = now if isinstance(now, Mapping) else {}
    differ = [at for name, at in own_loaders(model).items() if (given or {}).get(name) != own.get(name)]
    return lambda name: any(not at or name.startswith(f"{at}.") for at in differ)


def attached(values: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> OrderedDict[str, Any]:
    """Return ``values`` in a new mapping that carries ``metadata`` as a ``state_dict()`` does."""
    result: OrderedDict[str, Any] = OrderedDict(values)
    if metadata is not None:
        result._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]  # as torch does it
    return result


def plain_model(saved: Any, name: str) -> tuple[dict[str, Any], Versions | None]:
    """Return the values and the versions from a loaded model file.

    Raises:
        IntegrityError: It is something else.
    """
    if type(saved) not in (dict, OrderedDict):
        raise IntegrityError(f"{name} holds a {type(saved).__name__}, not a dict of tensors.")
    if odd := [key for key in saved if type(key) is not str]:
        raise IntegrityError(f"{name} holds a value under a key of type {type(odd[0]).__name__}.")
    metadata = vars(saved).get("_metadata") if type(saved) is OrderedDict else None  # a file can carry nothing else
    return dict(saved), None if metadata is None else checked(metadata, name)


def checked(metadata: Any, name: str) -> Versions:
    """Check and return versions from an untrusted file.

    Raises:
        IntegrityError: They are not numbers and text by name.
    """
    modules = dict(metadata) if isinstance(metadata, Mapping) else {"": metadata}
    for key, of in modules.items():
        if type(key) is not str or type(of) not in (dict, OrderedDict) or not all(map(is_plain, of.items())):
            raise IntegrityError(f"The versions of the modules in {name} are not numbers and text by name.")
    return {key: dict(of) for key, of in modules.items()}


def to_text(versions: Versions) -> str:
    """Return versions as one text, so that a host copy does not have to walk them."""
    return json.dumps(versions, sort_keys=True, separators=(",", ":"))


def from_text(text: Any, name: str) -> Versions:
    """Return the versions that :func:`to_text` converted.

    Raises:
        IntegrityError: It is something else.
    """
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise IntegrityError(f"The versions of the modules in {name} are broken: {error}") from error
    return checked(found, name)


def versions_in(extra: Mapping[str, Any], path: Iterable[Any], name: str = "the save") -> Versions | None:
    """Return the versions of the module at ``path`` in a saved extra state; None if it has none of it.

    Raises:
        IntegrityError: They are broken.
    """
    wanted = list(path)
    kept = extra.get(KEY)
    for entry in kept if isinstance(kept, list) else ():
        if not isinstance(entry, list) or len(entry) != 2:
            raise IntegrityError(f"The versions of the modules in {name} are broken.")
        if entry[0] == wanted:
            return from_text(entry[1], name)
    return None


def _bare(name: str) -> str:
    return bare(f"{name}.x" if name else "x").rpartition(".")[0]


def is_plain(item: tuple[Any, Any]) -> bool:
    """Whether an item of a module's metadata is of the kinds that are kept: a number or a text, by name."""
    return type(item[0]) is str and type(item[1]) in _TYPES


def _plain(values: Any, name: str) -> dict[str, Any]:
    items = values.items() if isinstance(values, Mapping) else ()
    kept = dict(filter(is_plain, items))
    if left := sorted(str(key) for key, _ in items if key not in kept):
        _warn(name or "the model", ", ".join(left))
    return kept


@functools.cache
def _warn(name: str, keys: str) -> None:
    _log.warning("the metadata of %s in its state is not saved unless it is a number or text: %s", name, keys)
