"""Proves after a load that the live tensors are what was saved, whatever cut them, moved them or loaded them.

Rules:
* Every rank sums its live tensors and compares them with the lists that the rank of its number and rank 0 wrote. So in
  the same topology nothing is sent but the verdicts. Otherwise the pieces go to rank 0, which reads the lists of all.
* All ranks get one verdict, so that all of them raise, or none does.
* What a module of another layout version may have migrated is not compared, nor is what no list here has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, LoadDiffers
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.core.tensor_lists import is_list, lost_lists
from ckptmirror.core.tensor_proof import Compared, Summed, compare, compare_whole, read_list
from ckptmirror.local import files
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.save_logger import save_logger
from ckptmirror.ranks.base import Ranks, exchange_result, gather_result

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport
    from ckptmirror.formats.train_state import TrainState

__all__ = ["check_loaded", "not_proved"]

_log = logging.getLogger("ckptmirror.load")
_NAMED = 8


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


def check_loaded(root: Path, meta: Meta, kind: Kind, state: TrainState, ranks: Ranks, report: LoadReport) -> None:
    """Compare the live tensors of all ranks with the lists of a save.

    Args:
        root: The directory with the files.
        meta: The save. The lists that it names, of this kind, are used, as far as they are there.
        kind: The kind that was loaded.
        state: What it was loaded into.
        ranks: All ranks of the job.
        report: What this rank loaded.

    Raises:
        LoadDiffers: A tensor is not what was saved; names it. Raised on every rank.
        IntegrityError: A list is broken.
    """
    from ckptmirror.formats.live_sums import live_sums

    lists = {one.rank: one for one in meta.artifacts_of(kind) if is_list(one.path) and one.rank is not None}
    live: list[Summed] = []
    found = Compared((), ())

    def compare_own() -> tuple[tuple[str, ...], bool]:
        nonlocal live, found
        live = live_sums(state, report.loaded) if lists else []
        near = [lists[rank] for rank in {ranks.rank, 0} if rank in lists]
        found = compare(live, (_read(root, one) for one in near))
        return _not_migrated(root, meta, kind, state, ranks, found.differ)[:_NAMED], bool(found.cut_otherwise)

    verdicts = exchange_result(ranks, compare_own, what="compare what was loaded")
    differ = [(rank, name) for rank, (names, _) in enumerate(verdicts) for name in names]
    not_compared = 0
    if not differ and any(is_open for _, is_open in verdicts):
        is_cut = set(found.cut_otherwise)

        def pieces() -> tuple[tuple[str, ...], list[Summed]]:
            more = [one for one in live if one.name in is_cut or one.region.sizes != one.region.shape]
            return found.cut_otherwise, more

        sent = gather_result(ranks, pieces, what="send the sums of what was loaded", to="first")

        def compare_all() -> tuple[tuple[str, ...], int]:
            if ranks.rank != 0:
                return (), 0
            names = {name for open_here, _ in sent.values() for name in open_here}
            read = (_read(root, one) for one in lists.values())
            whole = compare_whole([pieces for _, pieces in sent.values()], read, names)
            return _not_migrated(root, meta, kind, state, ranks, whole.differ)[:_NAMED], len(whole.cut_otherwise)

        names, not_compared = exchange_result(ranks, compare_all, what="compare the tensors that are cut otherwise")[0]
        differ = [(-1, name) for name in names]
    if differ:
        raise LoadDiffers(f"After the load of step {meta.step}, memory does not hold what was saved: {_words(differ)}.")
    if lists and ranks.is_leader:
        more = f"; {not_compared} could not be compared" if not_compared else ""
        save_logger(_log, meta).debug("step %d: %d tensors are as they were saved%s", meta.step, len(live), more)


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
    from ckptmirror.formats.base import LoadTarget
    from ckptmirror.formats.emergency import emergency_extra
    from ckptmirror.formats.live_sums import migrated_names
    from ckptmirror.formats.sidecars import extra_tree

    extra_of = emergency_extra if kind == "emergency" else extra_tree
    migrated = migrated_names(state.model, extra_of(root, meta, LoadTarget(state, ranks.rank, ranks.world_size)) or {})
    return tuple(name for name in differ if not migrated(name))


def _read(root: Path, artifact: Artifact) -> list[Summed]:
    path = root / artifact.path
    try:
        data = files.read_limited(path, artifact.digest.size_bytes)
    except FileNotFoundError:
        return []
    if len(data) != artifact.digest.size_bytes or crc32c(data) != artifact.digest.crc32c:
        raise IntegrityError(f"{path} is not what was saved.")
    try:
        return read_list(data)
    except CkptMirrorError as error:
        raise IntegrityError(f"{path} is not a list of tensors: {error.message}") from error
