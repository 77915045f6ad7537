"""Copies the bytes of many tensors to host memory, from any device.

Rules:
* When ``copy_all`` returns, the bytes have arrived.
* A few threads of this module copy host memory, each taking the next piece when it is done with one. If another process
  uses one of the cores, the other threads do more. torch would start and join its pool for every tensor, with equal
  shares: on a machine whose cores are busy, each of these joins waits for a core.
* Copies from a device run on their own stream, which waits for the work that the training has queued. The host goes on
  meanwhile only if bytes are all that is copied: torch reorders on the host, at once, whether the bytes have arrived or
  not. Views are conjugated and negated there: on the way, torch negates what is not one run of bytes twice.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["copy_all"]

_THREADS_LIMIT = 4  # enough to fill the memory channels of most machines
_MOVED_FROM_BYTES = 128 * 1024  # smaller ones cost less in one grouped copy
_PIECE_BYTES = 4 * 1024 * 1024
_ALONE_BYTES = 32 * 1024 * 1024  # a smaller total is not worth a thread

_Move = tuple[int, int, int]  # to, from, how many bytes


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target: host memory of the same shape and dtype."""
    streams: dict[torch.device, Any] = {}
    try:
        _begin_or_copy(targets, sources, streams)
    finally:  # also after Ctrl-C: what a device still sent would arrive in the next copy
        for stream in streams.values():
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
            done.synchronize()


def _begin_or_copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], streams: dict[torch.device, Any]
) -> None:
    """Copy what is in host memory, and begin to copy the rest, each device's on its stream."""
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


def _copy_from_device(target: torch.Tensor, source: torch.Tensor, streams: dict[torch.device, Any]) -> None:
    device = source.device
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        streams[device].wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(streams[device]):
        source = source.resolve_conj().resolve_neg()
        target.copy_(source, non_blocking=_is_same_run(target, source))


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
    """Move all runs, in pieces that the threads take one by one; the caller's thread is one of them."""
    size_bytes = sum(move[2] for move in moves)
    pieces = deque(_cut(moves))
    threads = min(_THREADS_LIMIT, len(os.sched_getaffinity(0)), 1 + size_bytes // _ALONE_BYTES)
    started: list[threading.Thread] = []
    try:
        for _ in range(threads - 1):
            thread = threading.Thread(target=_move_pieces, args=(pieces,), name="ckptmirror-copy")
            try:
                thread.start()
            except RuntimeError:  # no more threads: the machine's limit, or the end of the interpreter
                break
            started.append(thread)
        _move_pieces(pieces)
    finally:
        pieces.clear()  # of an interrupted copy
        _join(started)


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for all threads, even after Ctrl-C: a thread that kept running would write into the next copy."""
    for thread in threads:
        try:
            thread.join()
        except BaseException:
            _join(threads)
            raise


def _cut(moves: Sequence[_Move]) -> Iterator[_Move]:
    for target, source, size_bytes in moves:
        for first in range(0, size_bytes, _PIECE_BYTES):
            yield target + first, source + first, min(_PIECE_BYTES, size_bytes - first)


def _move_pieces(pieces: deque[_Move]) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        ctypes.memmove(*piece)  # without the GIL
