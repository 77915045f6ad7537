"""Moving many tensors' bytes at once: all of them arrive, from whatever form, in however many threads."""

from __future__ import annotations

import threading

import pytest
import torch

from ckptmirror.ranks.host_transfer import copy_all

KIB = 1024


def test_every_byte_arrives_whatever_the_sizes() -> None:
    sizes = [1, 7, 64 * KIB, 128 * KIB, 128 * KIB + 1, 3_000_001, 70 * KIB * KIB + 13, 40 * KIB * KIB]
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    targets = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(600, 700).t(),
        torch.randn(300, 2)[:, :1].expand(300, 800),
        torch.randn(100_000, dtype=torch.complex64).conj(),
        torch.randn(100_000, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "expanded", "conjugate", "negative"],
)
def test_a_large_tensor_that_is_not_one_run_of_bytes_keeps_its_values(source: torch.Tensor) -> None:
    target = torch.empty(source.shape, dtype=source.dtype)
    copy_all([target], [source])
    assert torch.equal(target, source)


def test_nothing_to_copy_is_no_error_and_no_thread_is_left() -> None:
    before = threading.active_count()
    copy_all([], [])
    source = torch.zeros(80 * KIB * KIB, dtype=torch.uint8)
    copy_all([torch.empty_like(source)], [source])
    assert threading.active_count() == before


def test_where_no_thread_can_be_started_the_caller_moves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source = torch.randint(0, 256, (80 * KIB * KIB,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy_all([target], [source])
    assert torch.equal(target, source)
