"""The memory of a host copy: lent to one at a time, kept for the next, and no more of it than the state takes."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks.host_copy import HostCopier


def test_a_lease_that_an_interrupt_kept_from_its_caller_can_be_reclaimed() -> None:
    copier = HostCopier()
    lost = copier.copy({"t": torch.zeros(3)})
    with pytest.raises(UsageError, match="still in use"):
        copier.copy({"t": torch.ones(3)})
    copier.reclaim()
    with copier.copy({"t": torch.ones(3)}) as lease:
        lost.release()
        assert torch.equal(lease.tree["t"], torch.ones(3))
        with pytest.raises(UsageError, match="still in use"):
            copier.copy({})


def test_memory_is_lent_to_one_copy_at_a_time() -> None:
    copier = HostCopier()
    lease = copier.copy({"w": torch.ones(5)})
    with pytest.raises(UsageError, match="still in use"):
        copier.copy({"w": torch.zeros(5)})
    with pytest.raises(UsageError, match="still in use"):
        copier.release()
    assert torch.equal(lease.tree["w"], torch.ones(5))
    lease.release()
    lease.release()
    with pytest.raises(UsageError, match="released"):
        _ = lease.tree
    with copier.copy({"w": torch.zeros(5)}) as second:
        lease.release()
        assert torch.equal(second.tree["w"], torch.zeros(5))
        with pytest.raises(UsageError):
            copier.copy({})
    copier.release()
    assert copier.nbytes == 0


def test_memory_is_kept_grows_and_shrinks_with_the_state() -> None:
    copier = HostCopier()
    mib = 2**20

    def held(size_mib: int) -> tuple[int, int]:
        with copier.copy({"w": torch.zeros(size_mib * mib // 4)}) as lease:
            return lease.tree["w"].data_ptr(), copier.nbytes

    first = held(16)
    assert held(16) == first
    assert held(12) == first
    assert held(24)[1] == 24 * mib
    assert held(4)[1] == 4 * mib
    assert copier.reserve({"w": torch.zeros(8 * mib // 4)}) == 8 * mib
    at = held(8)
    assert held(8) == at


def test_reserved_memory_with_room_serves_a_somewhat_larger_copy() -> None:
    copier = HostCopier()
    tree = {"model": torch.randn(3_000_000)}
    held = copier.reserve(tree, more_bytes=2**20)
    with copier.copy(tree | {"extra": torch.ones(1000)}) as lease:
        assert copier.nbytes == held
        assert torch.equal(lease.tree["model"], tree["model"])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_rss_flat_over_50_saves() -> None:
    copier = HostCopier()
    state = {"w": [torch.randn(256, 1024) for _ in range(16)], "steps": [torch.tensor(float(i)) for i in range(300)]}
    sizes = []
    for _ in range(50):
        for weight in state["w"]:
            weight.add_(1)
        with copier.copy(state) as lease:
            assert torch.equal(lease.tree["w"][3], state["w"][3])
        sizes.append(resident_bytes())
    assert sizes[-1] - sizes[4] < 4 * 2**20


def test_the_copier_keeps_no_reference_to_the_source() -> None:
    copier = HostCopier()
    source = torch.ones(1000)
    gone = weakref.ref(source)
    lease = copier.copy({"w": source})
    del source
    assert gone() is None
    lease.release()
