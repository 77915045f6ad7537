"""Makes roots, mirrors and saves for tests, without a trainer: files of random bytes under valid metas.

Rules:
* What is made here is what a save leaves: the same names, digests and metas, through the same codec.
* Bytes are random but repeatable: the same save id gives the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_to_bytes, meta_to_bytes
from ckptmirror.core.model import Artifact, Attempt, AttemptList, Digest, Kind, Meta, Requirement, SaveRef, new_id
from ckptmirror.local.checksums import BlockDigest
from ckptmirror.stores.base import ObjectInfo, Store, Upload

RUN_ID = "5eed" * 8
FIRST_ATTEMPT = Attempt(id="a0" * 16, number=0, parent=None)


def save_id_of(number: int) -> str:
    """The id of a save that a test numbers."""
    return f"{number:032x}"


def make_attempt(number: int, parent: Meta | SaveRef | None = None, *, attempt_id: str | None = None) -> Attempt:
    """A decided attempt; ``parent`` is the save that it resumed from."""
    ref = parent.ref if isinstance(parent, Meta) else parent
    return Attempt(id=attempt_id or new_id(), number=number, parent=ref)


def digest_of(data: bytes | memoryview) -> Digest:
    """The digest of some bytes."""
    found = BlockDigest()
    found.update(data)
    return found.digest()


def plan_files(
    step: int, kinds: Sequence[Kind], *, ranks: int = 1, sidecars: bool = True, tag: str = ""
) -> dict[str, tuple[tuple[Kind, ...], int | None]]:
    """The paths of a save, each with the kinds that need it and its rank."""
    name = names.SaveName(step, tag)
    every = tuple(kinds)
    files: dict[str, tuple[tuple[Kind, ...], int | None]] = {}
    if "emergency" in kinds:
        directory = names.emergency_dir_name(step, "20260102T030405Z", tag)
        return {f"{directory}/state_rank{rank}.pt": (("emergency",), rank) for rank in range(ranks)}
    if "dcp" in kinds:
        files[f"{name.dcp_dir}/.metadata"] = (("dcp",), None)
        files |= {f"{name.dcp_dir}/__{rank}_0.distcp": (("dcp",), rank) for rank in range(ranks)}
    if "model" in kinds:
        files[name.model] = (("model",), 0)
        if sidecars:
            files |= {name.optim(rank): (("model",), rank) for rank in range(ranks)}
    if sidecars:
        for rank in range(ranks):
            files[name.extra(rank)] = (every, rank)
            files[name.tensors(rank)] = (every, rank)
    return files


def make_save(
    root: Path,
    step: int,
    kinds: Sequence[Kind] = ("dcp", "model"),
    attempt: Attempt = FIRST_ATTEMPT,
    number: int = 1,
    *,
    ranks: int = 1,
    save_id: str | None = None,
    tag: str | None = None,
    size_bytes: int = 3000,
    sizes: Mapping[str, int] | None = None,
    contents: Mapping[str, bytes] | None = None,
    sidecars: bool = True,
    metrics: Mapping[str, float] | None = None,
    run_id: str = RUN_ID,
    write_meta: bool = True,
    **more: Any,
) -> Meta:
    """Write a whole save into ``root`` and return its meta.

    ``tag`` is chosen like a save's if None. By the last component of a path, ``sizes`` overrides ``size_bytes``, and
    ``contents`` the random bytes.
    """
    root.mkdir(parents=True, exist_ok=True)
    save_id = save_id or new_id()
    if tag is None:
        taken = any(
            (parsed := names.parse_name(entry.name)) is not None and (parsed.step, parsed.tag) == (step, "")
            for entry in root.iterdir()
        )
        tag = save_id[:8] if taken else ""
    artifacts = []
    for path, (needed_by, rank) in plan_files(step, kinds, ranks=ranks, sidecars=sidecars, tag=tag).items():
        size = (sizes or {}).get(path.rpartition("/")[2], size_bytes)
        data = random.Random(f"{save_id} {names.untagged(path)}").randbytes(size)
        data = (contents or {}).get(path.rpartition("/")[2], data)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
        artifacts.append(Artifact(path=path, kinds=needed_by, rank=rank, digest=digest_of(data)))
    meta = Meta(
        run_id=run_id,
        attempt=attempt,
        step=step,
        save_id=save_id,
        save_number=number,
        kinds=tuple(kinds),
        world_size=ranks,
        nodes=1,
        node=0,
        artifacts=tuple(sorted(artifacts, key=lambda artifact: artifact.path)),
        tag=tag,
        metrics=dict(metrics or {}),
        **more,
    )
    if write_meta:
        (root / names.SaveName(step, tag).meta).write_bytes(meta_to_bytes(meta))
    return meta


def put_attempts(
    place: Path | Store, attempts: Iterable[Attempt], *, run_id: str = RUN_ID, required: tuple[str, ...] = ()
) -> None:
    """Write the list of attempts of a root (which makes it a training root) or of a mirror."""
    data = attempts_to_bytes(AttemptList(run_id, tuple(attempts), tuple(Requirement(url, 0) for url in required)))
    if isinstance(place, Path):
        (place / names.CONTROL_DIR).mkdir(parents=True, exist_ok=True)
        (place / names.ATTEMPTS_NAME).write_bytes(data)
        return
    place.identity()  # a trainer's first contact: a directory is made
    there = place.stat(names.WRITER_NAME)
    place.write(names.WRITER_NAME, data, if_generation=there.generation if there else 0)


class BytesSource:
    """Bytes to upload, counted as they are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read_bytes = 0

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        piece = self.data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        self.read_bytes += len(piece)
        return len(piece)


def put_object(store: Store, name: str, data: bytes, meta: Meta) -> ObjectInfo:
    """Upload one object as a save's."""
    metadata = {
        "ckptmirror-run": meta.run_id,
        "ckptmirror-attempt": meta.attempt.id,
        "ckptmirror-save": meta.save_id,
    }
    return store.upload(Upload(name=name, source=BytesSource(data), digest=digest_of(data), metadata=metadata))


def put_on_mirror(store: Store, root: Path, meta: Meta, *, commit: bool = True) -> Meta:
    """Copy a local save to a mirror, its meta last; under tagged names where plain ones are taken there."""
    store.identity()
    artifacts = []
    for artifact in meta.artifacts:
        name = artifact.path
        if store.stat(name) is not None:
            name = names.tagged(names.untagged(name), meta.save_id)
        put_object(store, name, (root / artifact.path).read_bytes(), meta)
        artifacts.append(replace(artifact, object=None if name == artifact.path else name))
    there = replace(meta, artifacts=tuple(artifacts))
    if commit:
        name = names.SaveName(meta.step, meta.tag).meta
        if store.stat(name) is not None:
            name = names.SaveName(meta.step, meta.save_id[:8]).meta
        store.write(name, meta_to_bytes(there), if_generation=0)
    return there


def bytes_of(root: Path, meta: Meta) -> dict[str, bytes]:
    """The content of every artifact of a save, by untagged path."""
    return {names.untagged(a.path): (root / a.path).read_bytes() for a in meta.artifacts}
