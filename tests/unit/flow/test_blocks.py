"""Blocks of every size: those that share a range, and those that are larger than a buffer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import Digest
from ckptmirror.flow.fetch.blocks import (
    RANGE_BYTES,
    FileToRead,
    Finding,
    Incoming,
    ObjectToRead,
    read_all,
    receive,
)
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores import memory
from tests.kit.faults import flip_bit

SIZE = 2 * RANGE_BYTES + 5001


@pytest.fixture(params=[RANGE_BYTES // 2, RANGE_BYTES, 2 * RANGE_BYTES, 4 * RANGE_BYTES])
def digest(request: pytest.FixtureRequest) -> Digest:
    """Of a file of ``SIZE`` bytes in which each block has other bytes."""
    block, data = request.param, content()
    return Digest(SIZE, crc32c(data), block, tuple(crc32c(data[at : at + block]) for at in range(0, SIZE, block)))


def content() -> bytes:
    return b"".join(number.to_bytes(4, "big") * 1024 for number in range(-(-SIZE // 4096)))[:SIZE]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("at", [0, RANGE_BYTES // 2 - 1, RANGE_BYTES, 2 * RANGE_BYTES - 1, SIZE - 1])
def test_the_block_that_holds_a_flipped_bit_is_named(tmp_path: Path, digest: Digest, at: int, cached: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(content())
    assert read_all([FileToRead(path, digest, cached)]) == [None]
    flip_bit(path, at)
    block = at // digest.block_size_bytes
    begin = block * digest.block_size_bytes
    assert read_all([FileToRead(path, digest, cached)]) == [
        Finding(f"the crc32c of block {block} (from byte {begin}) is wrong")
    ]


def test_a_file_that_is_longer_than_it_was_saved_is_damaged(tmp_path: Path, digest: Digest) -> None:
    path = tmp_path / "file"
    path.write_bytes(content() + b"more")
    assert read_all([FileToRead(path, digest)]) == [Finding(f"it has {SIZE + 4} bytes, but {SIZE} were saved")]
    path.write_bytes(b"more")
    empty = Digest(0, 0, digest.block_size_bytes, ())
    assert read_all([FileToRead(path, empty)]) == [Finding("it has 4 bytes, but 0 were saved")]


def test_a_file_that_ends_too_early_lacks_all_blocks_from_there(tmp_path: Path, digest: Digest) -> None:
    path = tmp_path / "file"
    path.write_bytes(content()[: SIZE - 1])
    (found,) = read_all([FileToRead(path, digest)])
    assert found is not None
    assert f"block {len(digest.blocks) - 1} " in found.why


def test_only_the_blocks_that_hold_the_wanted_ranges_arrive(tmp_path: Path, digest: Digest) -> None:
    memory.drop("ranges")
    store = memory.open("memory://ranges/run")
    whole = store.write("whole", content(), if_generation=0)
    source = ObjectToRead(store, "whole", whole.generation, digest)
    size = digest.block_size_bytes
    counts: list[int] = []
    expected = 0
    for wanted in (
        [],
        [range(5, 5)],
        [range(3, 9), range(7, 10)],
        [range(SIZE - 1, SIZE + 10**15)],
        [range(SIZE, 2 * SIZE)],
    ):
        path = tmp_path / f"of-{len(list(tmp_path.iterdir()))}"
        receive([Incoming(source, path, tuple(wanted))], on_bytes=lambda received, _kept: counts.append(received))
        inside = sorted({at // size for one in wanted for at in (one.start, one.stop - 1) if one and at < SIZE})
        expected += sum(min((n + 1) * size, SIZE) - n * size for n in inside)
        assert sum(counts) == expected
        for number in inside:
            block = slice(number * size, (number + 1) * size)
            assert path.read_bytes()[block] == content()[block]
        assert not path.exists() or path.stat().st_size == SIZE


def test_what_arrives_is_what_was_saved_or_an_error_that_names_the_object_and_the_block(
    tmp_path: Path, digest: Digest
) -> None:
    memory.drop("blocks")
    store = memory.open("memory://blocks/run")
    whole = store.write("whole", content(), if_generation=0)
    broken = store.write("broken", content()[:-1] + b"?", if_generation=0)
    told: list[tuple[int, int]] = []
    incoming = Incoming(ObjectToRead(store, "whole", whole.generation, digest), tmp_path / "whole.tmp")
    receive([incoming], on_bytes=lambda *counts: told.append(counts))
    assert (tmp_path / "whole.tmp").read_bytes() == content()
    assert (sum(received for received, _ in told), sum(kept for _, kept in told)) == (SIZE, 0)
    receive([incoming], on_bytes=lambda *counts: told.append(counts))
    assert (sum(received for received, _ in told), sum(kept for _, kept in told)) == (SIZE, SIZE)
    other = Incoming(ObjectToRead(store, "broken", broken.generation, digest), tmp_path / "broken.tmp")
    with pytest.raises(IntegrityError, match=f"memory://blocks/run/broken .* block {len(digest.blocks) - 1} "):
        receive([other], on_bytes=lambda *_counts: None)
