"""Tensors: compares what is in the files of a save with the fingerprints that were taken from memory as it was saved.

A checksum says that a file is what was written. This says that what was written is what the ranks held.

Rules:
* Every tensor of a kind is read from its files, piece by piece, and summed. The sums are compared with the lists of all
  ranks (``tensors_*.json``), as ``diff`` compares two saves: it does not matter how either is cut.
* On a mirror, the files of one kind at a time come into a temporary directory.
* One node's part of a save is left out: pieces of its ranks' tensors may be in the files of other nodes. A snapshot has
  all that its ranks held.
* Left out are the settings of the optimizer, whose names may change, and what a list has no fingerprint of.
* A tensor that differs has no good copy in another place: it was written so. If its bytes were damaged later, ``deep``
  finds that, and names what repairs it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptmirror.core import names, per_rank
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, ObjectNotFound
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.core.tensor_lists import is_list, lost_lists
from ckptmirror.core.tensor_proof import Summed, difference
from ckptmirror.flow.fetch.blocks import Finding
from ckptmirror.flow.fetch.partial import receive_whole
from ckptmirror.flow.fetch.tensor_lists import lists_of, read_tensor_list
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.verify.structure import Subject

if TYPE_CHECKING:
    from ckptmirror.formats.shards import Piece

__all__ = ["TensorsFound", "are_elsewhere", "check_tensors", "have_no_list"]

_GROUPS = "optimizer.param_groups."


class TensorsFound(NamedTuple):
    """What came of comparing the tensors of one kind; all are names.

    Attributes:
        kind: The kind.
        equal: Tensors that are what was saved.
        differ: Tensors that are not.
        not_compared: Tensors that could not be compared.
    """

    kind: Kind
    equal: tuple[str, ...]
    differ: tuple[str, ...]
    not_compared: tuple[str, ...]


def are_elsewhere(subject: Subject) -> bool:
    """Whether pieces of the tensors of this node's part of a save may be on other nodes."""
    return subject.meta is not None and not subject.meta.is_whole and subject.meta.kinds != ("emergency",)


def have_no_list(subject: Subject) -> bool:
    """Whether nothing says what the tensors of a save were: it was staged without its lists."""
    return subject.meta is not None and not any(is_list(path) for path in subject.meta.paths)


def check_tensors(subject: Subject, mirror: Mirror | None) -> tuple[TensorsFound, ...]:
    """Compare the tensors of each whole kind of a save, and add a fault for a file that cannot be read.

    Args:
        subject: A save.
        mirror: The mirror that it is on; None if it is on a disk.
    """
    meta = subject.meta
    found = []
    for kind in subject.whole_kinds() if meta is not None and not lost_lists(meta) else ():
        assert meta is not None
        artifacts = [one for one in meta.artifacts_of(kind) if one.path not in subject.faults]
        try:
            with _at_hand(subject, mirror, meta, artifacts) as (root, here):
                found.append(_compare(root, here, kind))
        except (FileNotFoundError, ObjectNotFound):
            subject.faults[artifacts[0].path] = Finding("is gone", is_gone=True)
        except IntegrityError as error:
            subject.faults[artifacts[0].path] = Finding(error.message)
        except CkptMirrorError as error:
            subject.faults[artifacts[0].path] = Finding(error.message, "unreadable")
    return tuple(found)


@contextmanager
def _at_hand(
    subject: Subject, mirror: Mirror | None, meta: Meta, artifacts: list[Artifact]
) -> Iterator[tuple[Path, Meta]]:
    """Lend a directory with some files of a save, and the save with these alone."""
    here = replace(meta, artifacts=tuple(artifacts))
    if mirror is None:
        yield Path(subject.place), here
        return
    with tempfile.TemporaryDirectory(prefix="ckptmirror-") as name:
        receive_whole(mirror, meta, Path(name), artifacts)
        yield Path(name), here


def _compare(root: Path, meta: Meta, kind: Kind) -> TensorsFound:
    lists = [_compared(read_tensor_list(root, one)) for one in lists_of(meta, kind).values()]
    listed = {one.name for of_rank in lists for one in of_rank}
    saved = [_summed(name, piece) for name, piece in _pieces(root, meta, kind) if name in listed]
    found = difference([saved], lists)
    return TensorsFound(
        kind, found.equal, tuple(sorted(found.differ + found.reshaped)), found.only_second + found.not_compared
    )


def _compared(pieces: Iterable[Summed]) -> list[Summed]:
    return [one for one in pieces if not one.name.startswith(_GROUPS) and all(one.region.sizes)]


def _summed(name: str, piece: Piece) -> Summed:
    from ckptmirror.sums.fingerprints import fingerprint

    return Summed(
        name, str(piece.data.dtype).removeprefix("torch."), piece.region, fingerprint(piece.data, piece.region)
    )


def _pieces(root: Path, meta: Meta, kind: Kind) -> Iterator[tuple[str, Piece]]:
    """Yield the pieces of all tensors, each with its name in the lists."""
    from ckptmirror.formats.dcp_read import saved_pieces
    from ckptmirror.formats.rank_files import named_file, rank_files
    from ckptmirror.untrusted.tensor_files import load_pt

    name = SaveName(meta.step, meta.tag)
    if kind == "emergency":
        directory = meta.artifacts[0].path.partition("/")[0]
        files = rank_files(root, meta, lambda rank: f"{directory}/{names.emergency_files(rank)[0]}")
        for rank in files.ranks if files is not None else ():
            assert files is not None
            tree = files.tree(rank)
            yield from _tensors({part: tree.get(part) for part in ("model", "optimizer")})
            yield from _beside(tree.get("extra"))
        return
    if kind == "dcp":
        yield from saved_pieces(root / name.dcp_dir, meta.paths)
    else:
        yield from _tensors({"model": dict(load_pt(named_file(root, meta.paths, name.model), mmap=True))})
        optimizers = rank_files(root, meta, name.optim)
        for rank in optimizers.ranks if optimizers is not None else ():
            assert optimizers is not None
            yield from _tensors({"optimizer": optimizers.tree(rank)})
    extras = rank_files(root, meta, name.extra)
    for rank in extras.ranks if extras is not None else ():
        assert extras is not None
        yield from _beside(extras.tree(rank))


def _beside(extra: Any) -> Iterator[tuple[str, Piece]]:
    """Yield what the lists have of a rank's other state: averages, and values of its own."""
    if isinstance(extra, Mapping):
        yield from _tensors({"ema": extra.get("ema")})
        yield from _tensors(per_rank.with_own({}, None, _with_values(extra)))


def _with_values(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    own = extra.get(per_rank.KEY)
    return {per_rank.KEY: own} if isinstance(own, Mapping) and {"model", "optimizer"} <= own.keys() else {}


def _tensors(tree: Any) -> Iterator[tuple[str, Piece]]:
    from ckptmirror.core.containers import placed_leaves
    from ckptmirror.formats.shards import Piece, stored
    from ckptmirror.formats.tensor_bytes import has_memory, has_plain_bytes

    for path, leaf in placed_leaves(tree):
        piece = stored(leaf).held
        if isinstance(piece, Piece) and has_plain_bytes(piece.data) and has_memory(piece.data):
            yield ".".join(map(str, path)), piece
