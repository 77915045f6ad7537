"""The containers that a save marks and a load enters, the walks over trees of them, and which leaves take a state.

Rules:
* Containers are dicts (ordered, default and counting ones too), lists, tuples and deques, and no subclass of these.
  Everything else is a leaf.
* A walk goes in the containers' own order. It is recursive: a container in itself ends it with ``RecursionError``.
* A path is the keys and positions from the top of a tree.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

__all__ = [
    "TreePath",
    "any_leaf",
    "changed",
    "has",
    "is_mapping",
    "is_sequence",
    "item_at",
    "items_of",
    "leaves",
    "place",
    "placed_leaves",
    "rebuilt",
    "takes_state",
    "with_item",
]

TreePath = tuple[Hashable, ...]


_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, tuple, deque})
_CONTAINERS = _MAPPINGS | _SEQUENCES


def is_mapping(value: Any) -> bool:
    """Whether ``value`` is a container with keys."""
    return type(value) in _MAPPINGS


def is_sequence(value: Any) -> bool:
    """Whether ``value`` is a container with positions."""
    return type(value) in _SEQUENCES


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what is in a container, by key or position; nothing for a leaf."""
    return value.items() if is_mapping(value) else enumerate(value) if is_sequence(value) else ()


def leaves(tree: Any) -> Iterator[Any]:
    """Yield every leaf of ``tree``."""
    return (leaf for _, leaf in placed_leaves(tree))


def placed_leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Yield every leaf of ``tree`` after its path."""
    if type(tree) not in _CONTAINERS:
        yield path, tree
    for key, item in items_of(tree):
        if type(item) in _CONTAINERS:
            yield from placed_leaves(item, (*path, key))
        else:  # most are leaves, and a generator for each would take most of the time
            yield (*path, key), item


def any_leaf(tree: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether ``wanted`` is true for any leaf of ``tree``."""
    return any(map(wanted, leaves(tree)))


def has(value: Any, name: str) -> bool:
    """Whether a value, not a class, has an attribute."""
    return hasattr(value, name) and not isinstance(value, type)


def takes_state(value: Any) -> bool:
    """Whether ``value`` is an object that takes a state."""
    return has(value, "load_state_dict")


def changed(tree: Any, change: Callable[[Any, TreePath], Any], path: TreePath = ()) -> Any:
    """Return ``tree`` in new containers, with ``change(leaf, path)`` in place of each leaf."""
    if is_mapping(tree):
        return rebuilt(tree, {key: changed(item, change, (*path, key)) for key, item in tree.items()})
    if is_sequence(tree):
        return rebuilt(tree, [changed(item, change, (*path, index)) for index, item in enumerate(tree)])
    return change(tree, path)


def rebuilt(like: Any, items: Any) -> Any:
    """Return ``items`` (a dict or a list) in a new container of the kind of ``like``."""
    if type(like) is OrderedDict:
        ordered = OrderedDict(items)
        vars(ordered).update(vars(like))  # the versions of modules
        return ordered
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, items)
    return deque(items, like.maxlen) if type(like) is deque else type(like)(items)


def item_at(tree: Any, path: TreePath, absent: Any = None) -> Any:
    """Return what ``tree`` has at ``path``, or ``absent``."""
    for key in path:
        if is_sequence(tree):
            found = isinstance(key, int) and key < len(tree)
        else:
            found = isinstance(tree, Mapping) and key in tree
        if not found:
            return absent
        tree = tree[key]
    return tree


def with_item(tree: Any, path: TreePath, value: Any) -> Any:
    """Return ``tree`` with another value at ``path``, where it has one; the containers on the way are new."""
    if not path:
        return value
    items: Any = dict(tree) if is_mapping(tree) else list(tree)
    items[path[0]] = with_item(tree[path[0]], path[1:], value)
    return rebuilt(tree, items)


def place(tree: Any, path: TreePath, name: str) -> str:
    """Return the place of ``path`` in a tree called ``name``, for messages: ``extra.losses[3]``."""
    for key in path:
        name += f".{key}" if is_mapping(tree) else f"[{key}]"
        tree = tree[key]
    return name
