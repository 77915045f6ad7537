"""Damaged and hostile metas: read as they were, or refused with a BrokenMeta, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from core_builders import a_meta, digest_of, put, resealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmirror.core import sealed_json
from ckptmirror.core.codec import (
    attempts_from_bytes,
    meta_from_bytes,
    meta_or_tombstone_from_bytes,
    meta_to_bytes,
)
from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.model import MIN_BLOCK_SIZE_BYTES, Artifact

DATA = meta_to_bytes(a_meta())


@given(st.integers(0, len(DATA) - 1), st.integers(0, 7))
def test_no_flipped_bit_is_accepted(at: int, bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= 1 << bit
    try:
        read = meta_from_bytes(bytes(damaged))
    except BrokenMeta:
        return
    assert read == a_meta()  # white space, or an escape written another way


@given(st.integers(0, len(DATA) - 2))
def test_no_truncated_meta_is_accepted(length: int) -> None:
    with pytest.raises(BrokenMeta):
        meta_from_bytes(DATA[:length])


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_broken_meta(data: bytes) -> None:
    for read in (meta_from_bytes, meta_or_tombstone_from_bytes, attempts_from_bytes):
        with pytest.raises(BrokenMeta):
            read(data)


ODD_VALUES = [
    None, True, False, 0, -1, 1.5, 10**39, -(10**39), "", "x", "\0", "\ud800", [], [[]], {}, {"a": {}}, "é" * 5000,
    2**63,
    {"\x1b[2J\ud800": float("1e300"), "b" * 9999: {"\n": 10**39}},
    "../x", "dcp_000200/x", [None], ["dcp"], ["dcp", "model", "emergency", "dcp"], 1e308, "0" * 32,
]  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way] * bool(way) + [place for key, inner in items for place in places(inner, (*way, key))]


DOCUMENT = json.loads(DATA)
PLACES = [place for place in places(DOCUMENT) if place[0] != "checksum"]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(ODD_VALUES), st.randoms(use_true_random=False))
def test_any_value_anywhere_under_a_right_checksum_is_read_or_refused(place: Any, odd: Any, rng: random.Random) -> None:
    def change(document: dict[str, Any]) -> None:
        put(*place, odd)(document)
        if rng.random() < 0.3:
            put(*rng.choice([p for p in PLACES if len(p) == 1]), rng.choice(ODD_VALUES))(document)

    data = resealed(change)
    try:
        read = meta_from_bytes(data)
    except BrokenMeta as error:
        refusal = error
    else:
        assert meta_from_bytes(meta_to_bytes(read)) == read
        return
    assert str(refusal).isprintable()
    assert len(str(refusal)) < 1000


@given(st.sampled_from(PLACES))
def test_any_missing_value_is_read_or_refused(place: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for part in place[:-1]:
            target = target[part]
        del target[place[-1]]

    try:
        meta_from_bytes(resealed(change))
    except BrokenMeta:
        return
    assert place[0] in ("training_config", "metrics", "fields", "artifacts", "kinds")


def test_a_large_meta_is_read_in_bounded_time() -> None:
    count = 2000
    artifacts = tuple(
        Artifact(f"dcp_000200/__{rank}_0.distcp", ("dcp",), rank, digest_of(64 * MIN_BLOCK_SIZE_BYTES))
        for rank in range(count)
    )
    meta = a_meta(artifacts=artifacts, world_size=count)
    assert meta_from_bytes(meta_to_bytes(meta)) == meta


def test_limits_on_the_number_of_artifacts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmirror.core.codec.MAX_ARTIFACTS", 3)
    with pytest.raises(BrokenMeta, match="artifacts has 4 items; the limit is 3"):
        meta_from_bytes(DATA)
    monkeypatch.setattr(sealed_json, "LIMIT_BYTES", 100)
    with pytest.raises(BrokenMeta, match="the limit is 100"):
        meta_to_bytes(a_meta())
