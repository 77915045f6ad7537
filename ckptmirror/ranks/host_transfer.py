"""Moves the bytes of many tensors to host memory, whatever device they come from.

Rules:
* When ``copy_all`` returns, the bytes are there.
* Host memory is moved by a few threads of our own, each with its share of the bytes. torch would start and join its
  pool for every tensor: on a machine whose cores are busy, each of these joins waits for a core.
* Devices are copied from on a stream of their own, which waits for what the training has queued.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["copy_all"]

_THREADS_LIMIT = 4  # so many fill the memory channels of most machines
_MOVED_FROM_BYTES = 128 * 1024  # what is smaller costs less in one grouped copy
_ALONE_BYTES = 32 * 1024 * 1024  # less in all is not worth a thread

_Move = tuple[int, int, int]  # to, from, how many bytes


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target: host memory of the same shape and dtype."""
    streams: dict[torch.device, Any] = {}
    moves: list[_Move] = []
    small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if source.is_cuda:
            _copy_from_device(target, source, streams)
        elif not source.is_cpu:
            target.copy_(source)
        elif source.nbytes < _MOVED_FROM_BYTES:
            small[0].append(target)
            small[1].append(source)
        elif _is_same_run(target, source):
            moves.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            target.copy_(source)
    if small[0]:
        _copy_grouped(*small)
    _move(moves)
    for stream in streams.values():
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()


def _copy_from_device(target: torch.Tensor, source: torch.Tensor, streams: dict[torch.device, Any]) -> None:
    device = source.device
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        streams[device].wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(streams[device]):
        target.copy_(source, non_blocking=True)


def _is_same_run(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the copy is of one run of bytes to another."""
    return (
        source.dtype == target.dtype
        and source.is_contiguous()
        and target.is_contiguous()
        and not (source.is_conj() or source.is_neg())
    )


def _copy_grouped(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    # There is no public name for a grouped copy; it saves a Python call for each of thousands of small tensors.
    grouped = getattr(torch, "_foreach_copy_", None)
    if grouped is not None:
        grouped(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _move(moves: Sequence[_Move]) -> None:
    """Move all runs; the caller's thread takes the first share."""
    size_bytes = sum(move[2] for move in moves)
    threads = min(_THREADS_LIMIT, len(os.sched_getaffinity(0)), 1 + size_bytes // _ALONE_BYTES)
    first, *others = _shares(moves, -(-size_bytes // threads)) or [[]]
    started: list[threading.Thread] = []
    try:
        for share in others:
            thread = threading.Thread(target=_move_share, args=(share,), name="ckptmirror-copy")
            try:
                thread.start()
            except RuntimeError:  # no more threads: the machine's limit, or the end of the interpreter
                _move_share(share)
            else:
                started.append(thread)
        _move_share(first)
    finally:
        _join(started)


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for all, also when interrupted: one that went on would write into the next copy."""
    for thread in threads:
        try:
            thread.join()
        except BaseException:
            _join(threads)
            raise


def _shares(moves: Sequence[_Move], share_bytes: int) -> list[list[_Move]]:
    """Cut the moves, where need be in the middle of one, into shares of ``share_bytes``."""
    shares: list[list[_Move]] = []
    room = 0
    for target, source, left in moves:
        while left:
            if not room:
                shares.append([])
                room = share_bytes
            taken = min(left, room)
            shares[-1].append((target, source, taken))
            target, source, left, room = target + taken, source + taken, left - taken, room - taken
    return shares


def _move_share(share: Sequence[_Move]) -> None:
    for target, source, size_bytes in share:
        ctypes.memmove(target, source, size_bytes)  # without the GIL
