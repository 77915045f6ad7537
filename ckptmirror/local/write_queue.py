"""Writes buffers to a file, in order, in a thread beside the one that fills them.

Rules:
* The thread lives only while there is something to write, so it need not be stopped and keeps nothing alive.
* If no thread can be started (the interpreter is ending, or the machine allows no more), the caller writes, so that a
  save in progress is finished when a program ends.
* After a failure nothing more is written. Every buffer is given back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from ckptmirror.local.direct_io import give_buffer

__all__ = ["WriteQueue"]

Write: TypeAlias = Callable[[memoryview, int], None]


class WriteQueue:
    """A bounded queue of buffers from the pool; one thread at a time puts into it.

    Args:
        limit: How many buffers may be unwritten when ``put`` returns.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._state = threading.Condition()
        self._waiting: deque[tuple[Write, memoryview, int]] = deque()
        self._on_its_way = 0  # waiting or being written
        self._has_thread = False
        self._turn = threading.Lock()  # its holder writes
        self._failure: BaseException | None = None

    def put(self, write: Write, buffer: memoryview, offset: int) -> None:
        """Queue ``write(buffer, offset)``, which also gives the buffer back; wait while too many are unwritten.

        Raises:
            BaseException: The exception of the first write that failed.
        """
        with self._state:
            self._waiting.append((write, buffer, offset))
            self._on_its_way += 1
            needs_thread, self._has_thread = not self._has_thread, True
        if needs_thread:
            self._start()
        self._wait_for(self._limit)

    def drain(self) -> None:
        """Wait until everything is written.

        Raises:
            BaseException: The exception of the first write that failed.
        """
        self._wait_for(0)

    def stop(self) -> None:
        """Drop the waiting buffers, and wait for the write that has begun; ignore its exception."""
        with self._state:
            while self._waiting:
                give_buffer(self._waiting.popleft()[1])
                self._on_its_way -= 1
            self._state.wait_for(lambda: not self._on_its_way)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="ckptmirror-write").start()
        except RuntimeError:
            self._work()
        except BaseException:  # an interrupt; if the thread runs nevertheless, the next one waits for its turn
            self._has_thread = False
            raise

    def _wait_for(self, most: int) -> None:
        with self._state:
            self._state.wait_for(lambda: self._on_its_way <= most)
            if self._failure is not None:
                raise self._failure

    def _work(self) -> None:
        with self._turn:
            while True:
                with self._state:
                    if not self._waiting:
                        self._has_thread = False
                        return
                    write, buffer, offset = self._waiting.popleft()
                try:
                    if self._failure is None:
                        write(buffer, offset)
                except BaseException as error:  # noqa: BLE001 - raised by the next put() or drain()
                    self._failure = error
                finally:
                    del write  # which keeps the file's writer alive
                    give_buffer(buffer)
                    with self._state:
                        self._on_its_way -= 1
                        self._state.notify_all()
