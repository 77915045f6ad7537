"""Which tensors of a save go to which of the model: patterns to leave out, new names, and whether all have to match.

Rules:
* Names are those of ``model.state_dict()``, without prefixes of wrappers. A pattern is one of ``fnmatch``, where
  ``*`` also matches dots; ``exclude`` has it after ``model.``.
* Renaming comes first, then matching, then what is left out: patterns of ``exclude`` are over the model's names.
* A pattern that matches nothing is a mistake, and is refused with the names closest to it.
* A command that renames what it loads starts again from saves of its own, which have the new names: its ``rename`` is
  not done once more there. Names alone would not tell, for a rename may exchange them. So the metas of an attempt have
  a mark of what its ``rename`` makes of the model's names, which are those of its saves (:meth:`NameRules.for_save`).
  An attempt without one passes the mark on. A mark of the function itself would change with the order of a dict, the
  version of Python or what the function logs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ckptmirror.core.errors import CkptMirrorError, UsageError

__all__ = ["ALL_NAMES", "NameRules", "Rename", "mark_of", "marked", "name_rules", "parts_alone"]

Rename = Mapping[str, str] | Callable[[str], str]
_PREFIX = "model."


@dataclass(frozen=True)
class NameRules:
    """How the names of a save are matched with those of the model.

    Attributes:
        exclude: Patterns of the model's names that are not loaded.
        rename: Patterns of saved names, and what these become; or a function of a saved name.
        strict: Whether every name of the save and of the model has to match, as in ``load_state_dict``.
        kept: Names that stay, since an earlier start has renamed them.
    """

    exclude: tuple[str, ...] = ()
    rename: Rename = field(default_factory=dict)
    strict: bool = True
    kept: frozenset[str] = frozenset()

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns as they are given in ``exclude``."""
        return tuple(_PREFIX + pattern for pattern in self.exclude)

    def leaves(self, name: str) -> bool:
        """Whether a tensor of the model is left as it is."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def renamed(self, name: str) -> str:
        """Return the new name of a saved tensor.

        Raises:
            UsageError: The function fails, or returns something else.
        """
        if name in self.kept:
            return name
        if isinstance(self.rename, Mapping):
            return next((new for one in self.rename.items() if (new := _replaced(name, *one)) is not None), name)
        try:
            new = self.rename(name)
        except Exception as error:  # the user's function may raise anything
            raise UsageError(f"rename failed for {name}: {type(error).__name__}: {error}") from error
        if not isinstance(new, str):
            raise UsageError(f"rename returned {new!r} for {name}; it must return a name.")
        return new

    def pair(
        self,
        saved: Collection[str],
        live: Collection[str],
        elsewhere: Collection[str],
        match: Callable[[Iterable[str], Iterable[str]], Mapping[str, str]],
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the saved name for each name of the model that is loaded, and a line for what is not.

        Args:
            saved: The names in the save.
            live: The names in the model.
            elsewhere: The names that only other ranks hold; the save may have them too. If there are any, the caller
                checks the patterns (:meth:`check_patterns`): ``saved`` may lack what others read.
            match: Returns the live name for each saved one, or the saved one itself.

        Raises:
            UsageError: A name is missing or unexpected, none is on both sides, a pattern fits none, or two are one.
        """
        new = {name: self.renamed(name) for name in saved}
        first: dict[str, str] = {}
        for name, there in new.items():
            if (other := first.setdefault(there, name)) != name:
                raise UsageError(f"rename makes one name of {other} and {name}: {there}.")
        matched = match(first, [*live, *elsewhere])
        by_live = {matched[there]: name for there, name in first.items() if not self.leaves(matched[there])}
        missing = [name for name in live if name not in by_live and not self.leaves(name)]
        if not elsewhere:
            self.check_patterns(saved, {*matched.values(), *live}, missing)
        here = {*live, *elsewhere}
        unexpected = [name for there, name in by_live.items() if there not in here]
        if self.strict and (missing or unexpected):
            raise UsageError(
                "The checkpoint does not match the model."
                + (f" Missing in the checkpoint: {_some(missing)}." if missing else "")
                + (f" Not in the model: {_some(unexpected)}." if unexpected else ""),
                hint="The save has all names of the model as they are: leave `rename` out."
                if self.rename and missing and {*saved}.issuperset(live)
                else "Build the model with the configuration that the meta names (its `training_config`).",
            )
        if missing and not elsewhere and not {*live} & {*matched.values()}:
            raise UsageError(
                f"No tensor of the save is one of the model's: the save has {_some(list(first))}, and the model "
                f"{_some(missing)}.",
                hint='Say with rename={...} what they are called in the model, or leave it out: exclude=("model",).',
            )
        lines = (
            (f"model: {_some(left)}: left out (exclude), as they are" if (left := self._left(live)) else ""),
            (f"model: {_some(missing)}: not in the save, as they are (strict=False)" if missing else ""),
            (f"model: {_some(unexpected)}: in the save alone, not loaded (strict=False)" if unexpected else ""),
        )
        return {name: by_live[name] for name in live if name in by_live}, tuple(filter(None, lines))

    def optimizer(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state by parameter name under the new names, without what is left out."""
        new = {name: self.renamed(name) if isinstance(name, str) else name for name in saved.get("state") or {}}
        groups = [
            {**group, "params": [self.renamed(name) if isinstance(name, str) else name for name in group["params"]]}
            for group in saved["param_groups"]
        ]
        for group in groups:
            group["params"] = [name for name in group["params"] if not (isinstance(name, str) and self.leaves(name))]
        state = {name: saved["state"][old] for old, name in new.items() if not self.leaves(str(name))}
        return {**saved, "state": state, "param_groups": groups}

    def may_lack(self, names: Iterable[str]) -> bool:
        """Whether a tensor with these names may be on one side alone, the save or the model."""
        return not self.strict or any(map(self.leaves, names))

    def _left(self, live: Iterable[str]) -> list[str]:
        return [name for name in live if self.leaves(name)]

    def check_patterns(self, saved: Collection[str], known: Collection[str], missing: Collection[str] = ()) -> None:
        """Check that each pattern fits a name, given those of all ranks.

        One of ``rename`` fits, too, if its new names are there: an earlier start has renamed them. What it has renamed
        may also have left the model since, so if that start is known, and no name is missing, none is checked.

        Args:
            saved: The names in the save.
            known: Their new names, and those of the model.
            missing: The names of the model that the save lacks.

        Raises:
            UsageError: One fits none.
        """
        self._check_used("exclude", _PREFIX, self.exclude, known, "neither the model nor the save has a")
        if self.kept and not missing:
            return
        renamed = self.rename if isinstance(self.rename, Mapping) else {}
        made = {old for old, new in renamed.items() if new.strip("*") and any(fnmatchcase(name, new) for name in saved)}
        self._check_used("rename", "", [old for old in renamed if old not in made], saved, "the save has no")

    def mark(self, names: Iterable[str]) -> str:
        """Tell, as 16 hex digits, which names of a model ``rename`` changes, and to what; "" if there is none."""
        if not self.rename:
            return ""
        changed = [(name, new) for name in sorted(names) if (new := self._made_of(name)) != name]
        return hashlib.sha256(repr(changed).encode()).hexdigest()[:16]

    def _made_of(self, name: str) -> str:
        try:
            return self.renamed(name)
        except UsageError:  # a function may know only old names
            return name

    def for_save(self, architecture: str | None, mark: str, live: Collection[str]) -> NameRules:
        """Return the rules for a start from a save: names that an earlier start gave to its tensors stay.

        Args:
            architecture: The save's ``architecture_hash``.
            mark: That of this ``rename`` for the names of the model (:meth:`mark`).
            live: The names of the model, on all ranks.
        """
        if not mark or mark_of(architecture) != mark:
            return self
        return replace(self, kept=frozenset(live))

    def _check_used(self, what: str, prefix: str, patterns: Iterable[str], names: Collection[str], has: str) -> None:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"{what} holds {prefix + pattern!r}, and {has} tensor of that name. "
                    f"The closest: {', '.join(prefix + name for name in _closest(pattern, names)) or 'none'}.",
                    hint="Names are those of model.state_dict(); `*` stands for any text."
                    + (" Take it out if an earlier start has renamed them." if what == "rename" else ""),
                )


ALL_NAMES = NameRules()


def name_rules(exclude: Collection[str] = (), rename: Any = None, *, strict: bool = True) -> NameRules:
    """Return the rules that a caller gave.

    Raises:
        UsageError: They are not of their kinds.
    """
    if isinstance(rename, Mapping):
        for old, new in rename.items():
            are_texts = isinstance(old, str) and isinstance(new, str)
            if not are_texts or old.count("*") < new.count("*") or {*old} & {*"?["}:
                raise _bad_rename(f"rename holds {old!r}: {new!r}")
    elif rename is not None and not callable(rename):
        raise _bad_rename(f"rename is {rename!r}")
    patterns = tuple(one.removeprefix(_PREFIX) for one in exclude if _is_pattern(one))
    return NameRules(patterns, rename if rename is not None else {}, bool(strict))


def mark_of(architecture: str | None) -> str:
    """Return the mark in an ``architecture_hash``; "" if it has none."""
    return (architecture or "").partition(".")[2]


def marked(architecture: str | None, mark: str) -> str | None:
    """Return the ``architecture_hash`` of a save whose names a ``rename`` of this mark has given."""
    return f"{architecture or ''}.{mark}" if mark else architecture


def parts_alone(exclude: Any) -> Any:
    """Return what in ``exclude`` is not a pattern of tensors."""
    is_several = isinstance(exclude, Collection) and not isinstance(exclude, str)
    return [one for one in exclude if not _is_pattern(one)] if is_several else exclude


def _bad_rename(what: str) -> CkptMirrorError:
    return UsageError(
        f"{what}; it must be a dict of patterns, or a function of a name.",
        hint='Write rename={"old.*": "new.*"}: each `*` on the right stands for the one on the left in its place.',
    )


def _is_pattern(one: Any) -> bool:
    return isinstance(one, str) and one.startswith(_PREFIX) and one != _PREFIX


def _replaced(name: str, old: str, new: str) -> str | None:
    """Return the name with each ``*`` of ``new`` filled by that of ``old``; None if it does not match."""
    if not fnmatchcase(name, old):
        return None
    found = re.fullmatch("(.*?)".join(map(re.escape, old.split("*"))), name)
    parts = new.split("*")
    if found is None or len(parts) == 1:
        return new
    return parts[0] + "".join(text + part for text, part in zip(found.groups(), parts[1:], strict=False))


def _closest(pattern: str, names: Iterable[str]) -> list[str]:
    from difflib import get_close_matches  # needed only after a mistake

    return get_close_matches(pattern.replace("*", ""), sorted(names), n=3, cutoff=0.3)


def _some(names: Collection[str]) -> str:
    first = list(names)[:5]
    return ", ".join(first) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
