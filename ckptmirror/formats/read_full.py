"""Reads a whole save into plain values, without a live model: one process, no group.

Rules:
* It applies the same allow-lists and checks as a load into live objects. Nothing is executed, and nothing outside the
  save is opened.
* Sharded pieces are joined into full tensors.
* The model carries the versions of its modules like a ``state_dict()`` (``_metadata``), so ``load_state_dict`` takes
  it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptmirror.core.errors import KindMismatch
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.formats.dcp_read import read_full_directory
from ckptmirror.formats.rank_files import RankFiles, moved
from ckptmirror.formats.tensor_files import load_pt
from ckptmirror.formats.versions import attached, plain_model
from ckptmirror.formats.weights_only_values import decode

__all__ = ["read_extra", "read_full"]


def read_full(
    root: Path, meta: Meta, kind: Kind, map_location: str = "cpu"
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the model, and the optimizer state if present, of one kind of a save whose files are in ``root``.

    Raises:
        IntegrityError: A file is missing, broken or hostile.
        KindMismatch: The kind cannot be read by one process.
    """
    name = SaveName(meta.step, meta.tag)
    if kind == "dcp":
        tree = read_full_directory(root / name.dcp_dir)
        return moved(tree["model"], map_location), moved(tree.get("optimizer"), map_location)
    if kind != "model":
        raise KindMismatch(f"Kind {kind} is read by the ranks that wrote it: resume from it.")
    model, versions = plain_model(load_pt(root / name.model), name.model)
    files = _rank_files(root, meta, {rank: name.optim(rank) for rank in range(meta.world_size)})
    optimizer = files.full_value(()) if files is not None else None
    plain = {key: decode(value) for key, value in model.items()}
    return moved(attached(plain, versions), map_location), moved(optimizer, map_location)


def read_extra(root: Path, meta: Meta, map_location: str = "cpu") -> dict[str, Any] | None:
    """Return the extra state that rank 0 wrote; None if the files are not there (``stage`` without ``--full``)."""
    name = SaveName(meta.step, meta.tag)
    files = _rank_files(root, meta, {rank: name.extra(rank) for rank in range(meta.world_size)})
    extra = files.full_value(()) if files is not None else None
    return moved(extra, map_location) if isinstance(extra, dict) else None


def _rank_files(root: Path, meta: Meta, names: dict[int, str]) -> RankFiles | None:
    there = {artifact.path for artifact in meta.artifacts}
    paths = {rank: root / path for rank, path in names.items() if path in there}
    return RankFiles(paths, 0) if paths else None
