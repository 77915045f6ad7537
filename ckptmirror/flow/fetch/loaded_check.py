"""Proves after a load that the live tensors are what was saved, whatever cut them, moved them or loaded them.

Rules:
* Every rank sums its live tensors and compares them with the lists that the rank of its number and rank 0 wrote. So in
  the same topology nothing is sent but the verdicts. Otherwise the pieces go to rank 0, which reads the lists of all.
* What each rank had of its own (``core.per_rank``) is compared with the list of the rank of its number alone, and not
  at all where the number of ranks has changed, since it was merged.
* All ranks get one verdict, so that all of them raise, or none does.
* A list that is lost or damaged proves nothing, and that is said.
* What a module of another layout version may have migrated is not compared, nor is what no list here has.
* Then the objects of the user's classes are asked too (``loaded_objects``), now that all ranks have loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptmirror.core.errors import IntegrityError, LoadDiffers
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.name_rules import ALL_NAMES, NameRules
from ckptmirror.core.names import SaveName
from ckptmirror.core.tensor_lists import lost_lists
from ckptmirror.core.tensor_proof import Compared, Summed, compare, compare_whole, of_rank, under_rules
from ckptmirror.flow.fetch.loaded_objects import warn_of_objects
from ckptmirror.flow.fetch.tensor_lists import lists_of, read_tensor_list
from ckptmirror.local.save_logger import save_logger
from ckptmirror.ranks.base import Ranks, exchange_result, gather_result

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport
    from ckptmirror.formats.train_state import TrainState

__all__ = ["Checked", "check_loaded", "not_proved"]

_log = logging.getLogger("ckptmirror.load")
_NAMED = 8


class Checked(NamedTuple):
    """What came of a check that found no difference.

    Attributes:
        live: What this rank holds, with its sums; nothing if the save has no lists.
        missing: Lines about what could not be compared, which are logged; the same on all ranks.
    """

    live: list[Summed]
    missing: tuple[str, ...]


class _Verdict(NamedTuple):
    """What a rank found.

    Attributes:
        differ: The names of tensors that are not what was saved.
        is_open: Whether there are tensors that only the lists of all ranks can tell about.
        not_read: Why lists could not be read.
    """

    differ: tuple[str, ...]
    is_open: bool
    not_read: tuple[str, ...]


def not_proved(meta: Meta) -> tuple[str, ...]:
    """Return a line, and log it, if lists of a save are lost, so that a load of it cannot be proved; else nothing."""
    ranks = lost_lists(meta)
    if not ranks:
        return ()
    name = SaveName(meta.step, meta.tag).tensors(ranks[0])
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    line = f"tensors: {name}{more} is lost, so what was loaded is not proved to be what was saved"
    save_logger(_log, meta).warning("step %d: %s", meta.step, line)
    return (line,)


def check_loaded(
    root: Path,
    meta: Meta,
    kind: Kind,
    state: TrainState,
    ranks: Ranks,
    report: LoadReport,
    rules: NameRules = ALL_NAMES,
    bring_lists: Callable[[], Meta] | None = None,
) -> Checked:
    """Compare the live tensors of all ranks with the lists of a save.

    Args:
        root: The directory with the files.
        meta: The save. The lists that it names, of this kind, are used, as far as they are there.
        kind: The kind that was loaded.
        state: What it was loaded into.
        ranks: All ranks of the job.
        report: What this rank loaded.
        rules: Which of the model's tensors it loaded, and under which names.
        bring_lists: Called by all ranks if rank 0 lacks lists for tensors that are cut otherwise: brings the lists of
            all ranks of the save to it, and returns the save with them.

    Raises:
        LoadDiffers: A tensor is not what was saved; names it. Raised on every rank.
    """
    from ckptmirror.formats.live_sums import live_sums

    lists = lists_of(meta, kind)

    unread: dict[str, None] = {}

    def read(one: Artifact | None) -> list[Summed] | None:
        try:
            return under_rules(read_tensor_list(root, one), rules, are_saved=True) if one is not None else None
        except IntegrityError as error:
            unread[error.message.replace(f"{root}/", "")] = None
            return None

    live: list[Summed] = []
    found, not_its_own = Compared((), ()), frozenset[str]()

    def compare_own() -> _Verdict:
        nonlocal live, found, not_its_own
        live = under_rules(live_sums(state, report.loaded), rules, are_saved=False) if lists else []
        own, first = read(lists.get(ranks.rank)), read(lists.get(0)) or []
        listed, near = of_rank(live, own, first, is_merged=ranks.world_size != meta.world_size)
        found = compare(listed, near)
        if own is not None and ranks.world_size == meta.world_size:  # else what each rank had of its own was merged
            not_its_own = frozenset(found.cut_otherwise).difference(piece.name for piece in own)
        differ = _not_migrated(root, meta, kind, state, ranks, found.differ)[:_NAMED]
        return _Verdict(differ, bool(found.cut_otherwise), tuple(unread))

    verdicts = exchange_result(ranks, compare_own, what="compare what was loaded")
    differ = [(rank, name) for rank, one in enumerate(verdicts) for name in one.differ]
    not_compared, not_read = 0, [why for one in verdicts for why in one.not_read]
    if not differ and any(one.is_open for one in verdicts):
        is_cut = set(found.cut_otherwise)

        def pieces() -> tuple[tuple[str, ...], frozenset[str], list[Summed]]:
            more = [one for one in live if one.name in is_cut or one.region.sizes != one.region.shape]
            return found.cut_otherwise, not_its_own, more

        sent = gather_result(ranks, pieces, what="send the sums of what was loaded", to="first")

        def compare_all() -> tuple[tuple[str, ...], int, tuple[str, ...]]:
            if ranks.rank != 0:
                return (), 0, ()
            names = {name for open_here, _, _ in sent.values() for name in open_here}
            new_here = {name for _, new, _ in sent.values() for name in new if not name.startswith("ema.")}
            of_others: set[str] = set()  # a rank has what others had of their own, as after another split into stages

            def of_all() -> Iterator[list[Summed]]:
                for of_one in (read(one) or [] for one in lists.values()):
                    of_others.update(piece.name for piece in of_one if piece.per_rank and piece.name in new_here)
                    yield [piece for piece in of_one if not piece.per_rank]

            whole = compare_whole([pieces for _, _, pieces in sent.values()], of_all(), names)
            wrong = (*whole.differ, *sorted(of_others.difference(whole.differ)))
            differ = _not_migrated(root, meta, kind, state, ranks, wrong)[:_NAMED]
            lacks_lists = bool(lists) and len(lists) < meta.world_size
            return differ, len(whole.cut_otherwise) if lacks_lists else 0, tuple(unread)

        names, not_compared, why = exchange_result(ranks, compare_all, what="compare the tensors cut otherwise")[0]
        if not_compared and bring_lists is not None:
            lists = lists_of(bring_lists(), kind)
            names, not_compared, why = exchange_result(ranks, compare_all, what="compare them with all lists")[0]
        differ = [(-1, name) for name in names]
        not_read += why
    if differ:
        raise LoadDiffers(f"After the load of step {meta.step}, memory does not hold what was saved: {_words(differ)}.")
    if lists:
        warn_of_objects(state, report.loaded, lambda: _extra_of(root, meta, kind, state, ranks))
    lines = [f"tensors: {why} So what was loaded is not all proved to be what was saved" for why in _first(not_read)]
    if not_compared and not not_read:
        lines.append(
            f"tensors: {not_compared} are cut otherwise than they were saved, and were not compared, since lists of "
            "other ranks are not here"
        )
    for line in lines if ranks.is_leader else []:
        save_logger(_log, meta).warning("step %d: %s", meta.step, line)
    if lists and ranks.is_leader and not lines:
        save_logger(_log, meta).debug("step %d: %d tensors are as they were saved", meta.step, len(live))
    return Checked(live, tuple(lines))


def _first(reasons: Collection[str]) -> list[str]:
    """Return the first reason, and how many more there are."""
    different = list(dict.fromkeys(reasons))
    return [one + (f" ({len(different) - 1} more.)" if len(different) > 1 else "") for one in different[:1]]


def _words(differ: Iterable[tuple[int, str]]) -> str:
    of_name: dict[str, list[int]] = {}
    for rank, name in differ:
        of_name.setdefault(name, []).append(rank)
    texts = [f"{name} (rank {ranks[0]})" if ranks[0] >= 0 else name for name, ranks in of_name.items()]
    return ", ".join(texts[:_NAMED]) + (f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else "")


def _not_migrated(
    root: Path, meta: Meta, kind: Kind, state: TrainState, ranks: Ranks, differ: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names without those that a module of another layout version may have changed."""
    if not differ:
        return ()
    from ckptmirror.formats.live_sums import migrated_names

    migrated = migrated_names(state.model, _extra_of(root, meta, kind, state, ranks) or {})
    return tuple(name for name in differ if not migrated(name))


def _extra_of(root: Path, meta: Meta, kind: Kind, state: TrainState, ranks: Ranks) -> Any:
    """Return the extra state that this rank loaded; None if the save has none."""
    from ckptmirror.formats.base import LoadTarget
    from ckptmirror.formats.emergency import emergency_extra
    from ckptmirror.formats.sidecars import extra_tree

    extra_of = emergency_extra if kind == "emergency" else extra_tree
    return extra_of(root, meta, LoadTarget(state, ranks.rank, ranks.world_size))
