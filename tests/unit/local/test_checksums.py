"""CRC-32C of bytes and files: however they are cut, and wherever one bit flips."""

from __future__ import annotations

import array
import hashlib
import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import MIN_BLOCK_SIZE_BYTES, Digest
from ckptmirror.local import checksums, direct_io
from ckptmirror.local.checksums import BlockDigest, combine, crc32c, digest_file, verify_file


def plain_crc32c(data: bytes) -> int:
    """The definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def digest_of(data: bytes, cuts: list[int], block_size_bytes: int) -> Digest:
    found = BlockDigest(block_size_bytes)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        found.update(memoryview(data)[start:end])
    return found.digest()


def test_the_check_value_of_crc32c():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@given(data=st.binary(max_size=300))
def test_it_is_the_crc32c_of_the_definition(data: bytes):
    assert crc32c(data) == plain_crc32c(data)


@given(first=st.binary(max_size=500), second=st.binary(max_size=500))
def test_combining_is_laying_end_to_end(first: bytes, second: bytes):
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)
    assert crc32c(second, crc32c(first)) == crc32c(first + second)


@given(data=st.binary(max_size=2000), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_a_digest_does_not_depend_on_how_the_bytes_were_cut(data: bytes, cuts: list[int]):
    whole = digest_of(data, [], 64)
    assert digest_of(data, cuts, 64) == whole
    assert whole.size_bytes == len(data)
    assert whole.crc32c == crc32c(data)
    assert whole.blocks == tuple(crc32c(data[i : i + 64]) for i in range(0, len(data), 64))


@settings(max_examples=200)
@given(size=st.integers(0, 200), cuts=st.lists(st.integers(0, 200), max_size=6), seed=st.integers(0, 9))
def test_blocks_double_past_the_limit_and_stay_those_of_the_bytes(size: int, cuts: list[int], seed: int):
    data = random.Random(seed).randbytes(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "MAX_BLOCKS", 8)
        patch.setattr(checksums, "MIN_BLOCK_SIZE_BYTES", 4)
        digest = digest_of(data, cuts, 4)
        assert digest.block_size_bytes == next(4 << n for n in range(9) if size <= 8 * (4 << n))
    step = digest.block_size_bytes
    assert digest.blocks == tuple(crc32c(data[i : i + step]) for i in range(0, size, step))
    assert digest.crc32c == crc32c(data)
    assert len(digest.blocks) <= 8


def test_any_buffer_is_taken_by_its_bytes():
    numbers = array.array("d", [1.5, 2.5, 3.5])
    expected = crc32c(numbers.tobytes())
    assert crc32c(numbers) == crc32c(memoryview(numbers)) == crc32c(bytearray(numbers.tobytes())) == expected
    assert crc32c(memoryview(numbers.tobytes()).cast("d", (3, 1))) == expected
    with pytest.raises(BufferError):
        crc32c(memoryview(b"abcdef")[::2])


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65536, 65537, 300_000])
def test_a_file_on_disk_has_the_digest_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr(direct_io, "BUFFER_SIZE_BYTES", 65536)
    monkeypatch.setattr(direct_io, "_kept", [])
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    digest = digest_file(path)
    assert (digest.size_bytes, digest.crc32c) == (size, crc32c(data))
    verify_file(path, digest)
    verify_file(path, digest_of(data, [], 8 * 1024 * 1024))


def test_a_flipped_bit_is_found_with_its_block_and_offset(tmp_path: Path):
    path = tmp_path / "file"
    size = MIN_BLOCK_SIZE_BYTES * 2 + 1000
    path.write_bytes(bytes(size))
    digest = digest_file(path)
    assert len(digest.blocks) == 3
    for offset, block in ((5, 0), (MIN_BLOCK_SIZE_BYTES, 1), (size - 1, 2)):
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(b"\x10")
        start = block * MIN_BLOCK_SIZE_BYTES
        with pytest.raises(IntegrityError, match=rf"{path}: block {block} \(from byte {start}\)"):
            verify_file(path, digest)
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(b"\0")
    verify_file(path, digest)


def test_truncated_and_grown_files_are_found_by_size(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    digest = digest_file(path)
    for content in (b"1234", b"123456", b""):
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match=f"has {len(content)} bytes, but 5"):
            verify_file(path, digest)


def test_links_pipes_and_directories_are_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises(IntegrityError, match=r"symbolic link|regular file|cannot be opened"):
            digest_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "absent")


def tree_hash(data: bytes, piece: int) -> bytes:
    """RFC 6962, section 2.1, as it is written there."""
    if len(data) <= piece:
        return hashlib.sha256(b"\0" + data).digest()
    pieces = -(-len(data) // piece)
    half = piece * (1 << (pieces - 1).bit_length() - 1)
    return hashlib.sha256(b"\1" + tree_hash(data[:half], piece) + tree_hash(data[half:], piece)).digest()


@given(data=st.binary(max_size=600), cuts=st.lists(st.integers(0, 600), max_size=12))
def test_hashes_are_those_of_the_rfc_however_often_the_blocks_have_doubled(data: bytes, cuts: list[int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "MIN_BLOCK_SIZE_BYTES", 4)
        patch.setattr(checksums, "MAX_BLOCKS", 8)
        found = BlockDigest(4, is_hashed=True)
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for start, end in itertools.pairwise(edges):
            found.update(memoryview(data)[start:end])
        digest = found.digest()
        size = digest.block_size_bytes
        assert list(digest.hashes) == [tree_hash(data[at : at + size], 4) for at in range(0, len(data), size)]
        again = BlockDigest(size, is_hashed=True)
        again.update(data)
        assert again.digest() == digest
    assert replace(digest, hashes=()) == digest_of_small(data)


def digest_of_small(data: bytes) -> Digest:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "MAX_BLOCKS", 8)
        return digest_of(data, [], 4)


def test_a_file_that_was_changed_behind_its_crc32c_is_refused(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    found = BlockDigest(is_hashed=True)
    found.update(bytes(100))
    verify_file(path, found.digest())
    with pytest.raises(IntegrityError, match="somebody has changed it"):
        verify_file(path, replace(found.digest(), hashes=(bytes(32),)))
