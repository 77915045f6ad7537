"""Contents: asks what no checksum tells, whether the pieces of a DCP directory make up its tensors.

Rules:
* Only after every byte was compared (``deep``): a forged save has the checksums that it says.
* Nothing but ``.metadata`` is read again, and it is compared with the sizes in the save's meta: a load makes the same
  comparison, and refuses what is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, ObjectNotFound
from ckptmirror.core.model import Artifact
from ckptmirror.flow.fetch.blocks import Finding
from ckptmirror.flow.verify.structure import Subject
from ckptmirror.local.files import read_limited
from ckptmirror.stores.base import Store

__all__ = ["check_contents"]


def check_contents(subject: Subject, store: Store | None) -> None:
    """Add a fault for the ``.metadata`` of a save whose files of kind ``dcp`` are whole, if no load would take it.

    Args:
        subject: A save; ``store`` is its mirror, or None if it is on a disk.
    """
    files = [artifact for artifact in subject.artifacts if "dcp" in artifact.kinds]
    described = next((artifact for artifact in files if artifact.path.endswith("/.metadata")), None)
    if described is None or "dcp" not in subject.whole_kinds():
        return
    try:
        _check(subject, described, files, store)
    except (FileNotFoundError, ObjectNotFound):
        subject.faults[described.path] = Finding("is gone", is_gone=True)
    except IntegrityError as error:
        subject.faults[described.path] = Finding(error.message)
    except CkptMirrorError as error:
        subject.faults[described.path] = Finding(error.message, "unreadable")


def _check(subject: Subject, described: Artifact, files: list[Artifact], store: Store | None) -> None:
    from ckptmirror.formats.dcp_read import check_directory

    directory = described.path.removesuffix(".metadata")
    sizes_bytes: Mapping[str, int] = {
        artifact.path.removeprefix(directory): artifact.digest.size_bytes
        for artifact in files
        if artifact is not described and artifact.path.startswith(directory)
    }
    name, limit_bytes = subject.name_of(described), described.digest.size_bytes
    if store is None:
        data = read_limited(Path(subject.place, name), limit_bytes)
    else:
        data, _ = store.read(name, generation=subject.objects[name].generation, limit_bytes=limit_bytes)
    is_part = subject.meta is not None and not subject.meta.is_whole  # then other nodes have the other files
    check_directory(data, sizes_bytes, directory.rstrip("/"), all_here=not is_part)
