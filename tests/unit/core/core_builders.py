"""Values and hypothesis strategies that the tests of core share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.crc import combine_blocks
from ckptmirror.core.model import MIN_BLOCK_SIZE_BYTES, Artifact, Attempt, Digest, Kind, Meta, Requirement, SaveRef
from ckptmirror.core.names import MAX_STEP, SaveName

RUN_ID = "0" * 31 + "a"


def id_of(text: str) -> str:
    """Return an id of 32 hex digits that stands for ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def required(*urls: str) -> tuple[Requirement, ...]:
    """Return that a first attempt began with these mirrors as required."""
    return tuple(Requirement(url, 0) for url in urls)


def crc32c_bitwise(data: bytes) -> int:
    """Return the CRC-32C of ``data``, bit by bit from the definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def digest_of(size_bytes: int, *blocks: int, block_size_bytes: int = MIN_BLOCK_SIZE_BYTES) -> Digest:
    """Return a digest whose blocks are consistent with its size; missing blocks are numbered."""
    count = -(-size_bytes // block_size_bytes)
    crcs = tuple((*blocks, *range(1000, 1000 + count)))[:count]
    return Digest(size_bytes, combine_blocks(crcs, block_size_bytes, size_bytes), block_size_bytes, crcs)


def a_meta(**changes: Any) -> Meta:
    """Return a valid meta of step 200 with both kinds, or with what is given."""
    save_id = changes.get("save_id", id_of("save"))
    name = SaveName(changes.get("step", 200), changes.get("tag", ""))
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "attempt": Attempt(id_of("A"), 0, None),
        "step": 200,
        "save_id": save_id,
        "save_number": 1,
        "kinds": ("dcp", "model"),
        "world_size": 2,
        "nodes": 1,
        "node": 0,
        "artifacts": (
            Artifact(f"{name.dcp_dir}/.metadata", ("dcp",), 0, digest_of(100)),
            Artifact(f"{name.dcp_dir}/__0_0.distcp", ("dcp",), 0, digest_of(3 * MIN_BLOCK_SIZE_BYTES + 1)),
            Artifact(name.extra(0), ("dcp", "model"), 0, digest_of(0)),
            Artifact(name.model, ("model",), 0, digest_of(5)),
        ),
        "training_config": {"lr": 1e-3, "layers": [1, 2]},
        "architecture_hash": "abc",
        "metrics": {"val_loss": 1.5},
        "fields": {"tracker": {"id": "x"}},
        "created_at_utc": "2026-11-21T13:15:00+00:00",
    }
    return Meta(**(values | changes))


Change = Callable[[dict[str, Any]], None]
steps = st.one_of(st.integers(0, 2_000_000), st.integers(0, MAX_STEP))
tags = st.one_of(st.just(""), st.text("0123456789abcdef", min_size=8, max_size=8))
ids = st.text("0123456789abcdef", min_size=32, max_size=32)
ranks = st.one_of(st.integers(0, 20), st.integers(0, 10**6))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def digests(draw: st.DrawFn) -> Digest:
    """Return any consistent digest of a few blocks."""
    block_size = MIN_BLOCK_SIZE_BYTES << draw(st.integers(0, 3))
    size = draw(st.integers(0, 4 * block_size))
    blocks = draw(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
    return digest_of(size, *blocks, block_size_bytes=block_size)


@st.composite
def metas(draw: st.DrawFn) -> Meta:
    """Return any valid meta."""
    save_id, step = draw(ids), draw(steps)
    tag = draw(st.sampled_from(["", save_id[:8]]))
    name, world_size = SaveName(step, tag), draw(st.integers(1, 8))
    kinds: tuple[Kind, ...] = draw(st.sampled_from([("dcp",), ("model",), ("dcp", "model"), ("model", "dcp")]))
    paths: dict[str, tuple[Kind, ...]] = {name.optim(rank): kinds for rank in range(draw(st.integers(0, world_size)))}
    if "dcp" in kinds:
        shards = draw(st.lists(st.sampled_from(["__0_0.distcp", "__1_0.distcp", "pp0/.metadata", "pp1/a b.bin", "é"])))
        paths |= {f"{name.dcp_dir}/{shard}": ("dcp",) for shard in [".metadata", *shards]}
    if "model" in kinds:
        paths[name.model] = ("model",)
    parent = draw(st.none() | st.builds(SaveRef, ids, st.integers(1, 10**6), steps, ids))
    nodes = draw(st.integers(1, world_size))
    staged_from = draw(st.none() | st.just("gs://bucket/run"))
    return Meta(
        run_id=draw(ids),
        attempt=Attempt(draw(ids), draw(st.integers(0, 10**6)), parent),
        step=step,
        save_id=save_id,
        save_number=draw(st.integers(1, 10**6)),
        kinds=kinds,
        world_size=world_size,
        nodes=nodes,
        node=draw(st.integers(-1 if nodes > 1 else 0, nodes - 1)),
        artifacts=tuple(Artifact(p, k, draw(st.none() | ranks), draw(digests())) for p, k in paths.items()),
        tag=tag,
        training_config=draw(st.dictionaries(st.text(), plain, max_size=3)),
        architecture_hash=draw(st.none() | st.just("sha256:00")),
        metrics=draw(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False), max_size=3)),
        fields=draw(st.dictionaries(st.text(), plain, max_size=3)),
        created_at_utc=draw(st.sampled_from(["", "2026-11-21T13:15:00+00:00"])),
        staged_from=staged_from,
        partial=staged_from is not None and draw(st.booleans()),
    )


def resealed(change: Change, data: bytes | None = None) -> bytes:
    """Return a meta's bytes after ``change``, with a checksum that is right again: what a hostile mirror may hold."""
    document = json.loads(meta_to_bytes(a_meta()) if data is None else data)
    change(document)
    document.pop("checksum", None)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**document, "checksum": hashlib.sha256(canonical).hexdigest()}).encode()


def put(*path: Any) -> Change:
    """``put("artifacts", 0, "rank", 7)`` sets that field."""
    *way, key, value = path

    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for part in way:
            target = target[part]
        target[key] = value

    return change
