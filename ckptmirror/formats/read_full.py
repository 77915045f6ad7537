"""Reads a whole save into plain values, without a live model: one process, no group.

Rules:
* It applies the same allow-lists and checks as a load into live objects. Nothing is executed, and nothing outside the
  save is opened.
* Sharded pieces are joined into full tensors.
* The model carries the versions of its modules like a ``state_dict()`` (``_metadata``), so ``load_state_dict`` takes
  it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import KindMismatch
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.formats.dcp_read import read_full_directory
from ckptmirror.formats.rank_files import moved, named_file, rank_files
from ckptmirror.formats.versions import attached, plain_model
from ckptmirror.formats.weights_only_values import decode
from ckptmirror.untrusted.tensor_files import load_pt

__all__ = ["read_extra", "read_full"]


def read_full(
    root: Path, meta: Meta, kind: Kind, map_location: str = "cpu", exclude: Container[str] = ()
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the model, and the optimizer state if present and wanted, of one kind of a save in ``root``.

    Raises:
        IntegrityError: A file is missing, broken or hostile.
        KindMismatch: The kind cannot be read by one process.
    """
    name = SaveName(meta.step, meta.tag)
    if kind == "dcp":
        tree = read_full_directory(root / name.dcp_dir, meta.paths, exclude)
        return moved(tree["model"], map_location), moved(tree.get("optimizer"), map_location)
    if kind != "model":
        raise KindMismatch(f"Kind {kind} is read by the ranks that wrote it: resume from it.")
    model, versions = plain_model(load_pt(named_file(root, meta.paths, name.model)), name.model)
    plain = {key: decode(value) for key, value in model.items()}
    optimizer = _full(root, meta, name.optim) if "optimizer" not in exclude else None
    return moved(attached(plain, versions), map_location), moved(optimizer, map_location)


def read_extra(root: Path, meta: Meta, map_location: str = "cpu") -> dict[str, Any] | None:
    """Return the extra state that rank 0 wrote; None if the files are not there (``stage`` without ``--full``)."""
    extra = _full(root, meta, SaveName(meta.step, meta.tag).extra)
    return moved(extra, map_location) if isinstance(extra, dict) else None


def _full(root: Path, meta: Meta, name_of: Callable[[int], str]) -> Any:
    files = rank_files(root, meta, name_of)
    return None if files is None else files.full_value(())
