"""Where pieces lie in the kept memory, and how long that memory lives."""

from __future__ import annotations

import gc
import resource
import threading
import weakref

import pytest
import torch

from ckptmirror.ranks.host_arena import Arena, memory_of
from ckptmirror.ranks.host_layout import View, place, plan_pieces

MIB = 2**20


def test_pieces_never_overlap_and_large_ones_begin_at_a_page() -> None:
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in (1, 5000, 3, 4096, 70, 100_000, 1)]
    pieces = plan_pieces(View(key, tensor) for key, tensor in enumerate(tensors))
    (size,) = place(pieces, block_limit_bytes=None)
    end = 0
    for piece in pieces:
        assert piece.offset >= end
        assert piece.offset % (4096 if piece.size_bytes >= 4096 else 64) == 0
        end = piece.offset + piece.size_bytes
    assert size >= end


def test_blocks_stay_within_their_limit_unless_one_piece_is_larger() -> None:
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in (3 * MIB, 3 * MIB, 2 * MIB, 20 * MIB, MIB)]
    pieces = plan_pieces(View(key, tensor) for key, tensor in enumerate(tensors))
    sizes = place(pieces, block_limit_bytes=8 * MIB)
    assert sizes == [8 * MIB, 20 * MIB, MIB]
    assert [piece.block for piece in pieces] == [0, 0, 0, 1, 2]


def test_several_blocks_are_kept_and_replaced_together() -> None:
    arena = Arena()
    assert arena.fit([4 * MIB, 6 * MIB], pinned=False)
    assert not arena.fit([4 * MIB, 5 * MIB], pinned=False)
    assert arena.storage(1, 64, 100).nbytes() == 100
    assert arena.fit([4 * MIB], pinned=False)
    assert arena.size_bytes == 4 * MIB


def faulting_in() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckptmirror-memory"]


def test_populated_memory_costs_no_page_fault_any_more() -> None:
    arena = Arena()
    arena.fit([64 * MIB], pinned=False)
    arena.populate()
    for thread in faulting_in():
        thread.join()
    storage = arena.storage(0, 0, 64 * MIB)
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (64 * MIB,), (1,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    whole.fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 32, "one for each huge page, at the least"


class LockOfASlowThread:
    """A lock that the thread which faults memory in gets for a second time only once the memory is used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces = 0
        self.is_used = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() in faulting_in():
            self._pieces += 1
            if self._pieces == 2:
                assert self.is_used.wait(60)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("use", ["tensor", "storage"])
def test_nothing_is_written_to_memory_that_is_used(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmirror.ranks.host_arena._PAGES_AT_A_TIME", 1)
    arena, like = Arena(), torch.ones(4 * MIB, dtype=torch.uint8)
    slow = LockOfASlowThread()
    monkeypatch.setattr(arena, "_faulting_in", slow)
    arena.fit([4 * MIB], pinned=False)
    arena.populate()
    if use == "tensor":
        mine = arena.tensor(0, 0, like)
    else:
        mine = torch.empty(0, dtype=torch.uint8).set_(arena.storage(0, 0, 4 * MIB), 0, (4 * MIB,), (1,))
    mine.fill_(1)
    slow.is_used.set()
    for thread in faulting_in():
        thread.join()
    assert torch.equal(mine, like)


def test_released_memory_is_not_faulted_in_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmirror.ranks.host_arena._PAGES_AT_A_TIME", 1)
    arena = Arena()
    arena.fit([64 * MIB], pinned=False)
    block = weakref.ref(arena._blocks[0].obj)
    arena.populate()
    arena.release()
    for thread in faulting_in():
        thread.join()
    gc.collect()
    assert block() is None


def test_without_a_thread_the_first_use_faults_the_memory_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    arena = Arena()
    arena.fit([MIB], pinned=False)
    arena.populate()
    assert torch.equal(arena.tensor(0, 0, torch.zeros(5)), torch.zeros(5))


def test_memory_lives_as_long_as_a_tensor_in_it() -> None:
    arena = Arena()
    arena.fit([2 * MIB], pinned=False)
    arena.populate()
    tensor = torch.empty(0, dtype=torch.uint8).set_(arena.storage(0, 0, 2 * MIB), 0, (2 * MIB,), (1,))
    arena.release()
    gc.collect()
    assert arena.size_bytes == 0
    assert int(tensor.fill_(1).sum(dtype=torch.int64)) == 2 * MIB


def test_lent_tensor_memory_keeps_its_tensor() -> None:
    source = torch.arange(10, dtype=torch.uint8)
    gone = weakref.ref(source)
    view = torch.frombuffer(memory_of(source), dtype=torch.uint8, count=4, offset=3)
    del source
    gc.collect()
    assert gone() is not None
    assert view.tolist() == [3, 4, 5, 6]
    del view
    gc.collect()
    assert gone() is None


def test_a_tensor_is_made_once_for_its_place_and_anew_for_another_form() -> None:
    arena = Arena()
    arena.fit([MIB], pinned=False)
    first = arena.tensor(0, 4096, torch.ones(3, 5))
    assert (first.shape, first.dtype, first.untyped_storage().nbytes()) == ((3, 5), torch.float32, 60)
    assert arena.tensor(0, 4096, torch.zeros(3, 5)) is first
    assert arena.tensor(0, 4096, torch.zeros(5, 3)).shape == (5, 3)
    arena.fit([MIB + 1], pinned=False)
    assert arena.tensor(0, 4096, torch.zeros(3, 5)) is not first
