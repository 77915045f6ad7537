"""Stages in files: what each stage of a model has of its own, and one model has once, is kept under the stage's name.

Rules:
* A name belongs to one stage, so tensors need nothing of this. Parameter groups and module versions do.
* A load joins what the stages have, so that it sees the state of one model, whatever the stages were.
* Groups of different stages with equal settings are one group. Groups of one stage stay apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.name_rules import ALL_NAMES, NameRules
from ckptmirror.formats.already_filled import same
from ckptmirror.formats.names import match_names

__all__ = ["by_stage", "check_patterns", "elsewhere_in", "in_stages", "join_groups"]

_STAGE = re.compile(r"pp(\d{1,9})")


def in_stages(value: Any, stage: int | None) -> Any:
    """Return what a stage has of its own, under its name; unchanged if there are no stages."""
    return value if stage is None else {f"pp{stage}": value}


def by_stage(saved: Any) -> list[Any]:
    """Return what the stages have, in their order; without stages, the one value."""
    if type(saved) is not dict or not saved:
        return [saved]
    numbers = {name: _STAGE.fullmatch(name) if type(name) is str else None for name in saved}
    if None in numbers.values():
        return [saved]
    return [saved[name] for name in sorted(saved, key=lambda name: int(name[2:]))]


def join_groups(saved: Any) -> Any:
    """Return the parameter groups of one model, given those of each stage; without stages, unchanged.

    Raises:
        IntegrityError: What a stage has is no list of groups.
    """
    if type(saved) is not dict:
        return saved
    joined: list[dict[str, Any]] = []
    for groups in by_stage(saved):
        free = list(range(len(joined)))
        for group in groups if type(groups) is list else [None]:
            if type(group) is not dict or type(group.get("params")) is not list:
                raise IntegrityError("A stage of the saved optimizer has no parameter groups.")
            settings = _settings(group)
            at = next((number for number in free if same(_settings(joined[number]), settings)), None)
            if at is None:
                joined.append(dict(group))
            else:
                free.remove(at)
                joined[at] = {**joined[at], "params": [*joined[at]["params"], *group["params"]]}
    return joined


def elsewhere_in(
    saved: Iterable[str], live: Iterable[str], elsewhere: frozenset[str], rules: NameRules = ALL_NAMES
) -> Callable[[str], bool]:
    """Return a function that says of a saved name whether only other ranks hold what it names.

    Args:
        saved: All saved names.
        live: The names that this rank holds.
        elsewhere: Those that only other ranks hold.
        rules: The new names of saved values.
    """
    if not elsewhere:
        return lambda _: False
    matched: Mapping[str, str] = match_names(map(rules.renamed, saved), [*live, *elsewhere])
    return lambda name: matched.get(rules.renamed(name)) in elsewhere


def check_patterns(saved: Collection[str], live: Iterable[str], elsewhere: frozenset[str], rules: NameRules) -> None:
    """Check patterns of names with those of all stages; without other stages :meth:`NameRules.pair` does it.

    The arguments are those of :func:`elsewhere_in`.

    Raises:
        UsageError: One fits none.
    """
    if not (elsewhere and saved):
        return
    names = [*live, *elsewhere]
    there = {*match_names(map(rules.renamed, saved), names).values()}
    missing = [name for name in names if name not in there and not rules.leaves(name)]
    rules.check_patterns(saved, {*there, *names}, missing)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sorted(group.items()) if key != "params"}
