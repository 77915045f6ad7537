"""Downloads a range of an object into the caller's buffer.

Rules:
* The request names the generation: for a replaced object the service answers 404, never a mixture.
* The answer must be exactly the requested range. A shorter one is a temporary error, another one is refused, and of a
  longer one no more than the range is received.
* No checksum is computed here: the caller verifies the blocks.
"""

from __future__ import annotations

import re

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.stores.gs_answer import Answer
from ckptmirror.stores.gs_http import Transport, error_of

__all__ = ["download"]

_SLICE_BYTES = 1024 * 1024


def download(transport: Transport, target: str, what: str, offset: int, buffer: memoryview) -> None:
    """Fill ``buffer``, which is not empty, from ``offset`` of the object at ``target``.

    Raises:
        ObjectNotFound: The object does not exist at that generation.
        StoreTemporary: The answer was short, or none came in time.
    """
    last = offset + len(buffer) - 1
    with transport.get(target, {"Range": f"bytes={offset}-{last}"}) as response:
        if response.status == 416:
            raise StoreTemporary(f"{what}: the object ends before byte {offset}.")
        if response.status not in (200, 206):
            raise error_of(response, what)
        _check_range(response, what, offset, last)
        view = buffer.cast("B")
        response.expect(len(view))
        done = 0
        while done < len(view):
            count = response.readinto(view[done : done + _SLICE_BYTES])
            if count == 0:
                raise StoreTemporary(f"{what}: the answer ended after {done} of {len(view)} bytes.")
            done += count


def _check_range(response: Answer, what: str, offset: int, last: int) -> None:
    if response.status == 200:
        if offset or response.length != last + 1:
            raise StoreTemporary(f"{what}: the whole object was answered instead of bytes {offset} to {last}.")
        return
    found = re.fullmatch(
        r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", response.headers.get("Content-Range", "")
    )
    if found is None or int(found[1]) != offset or int(found[2]) > last:
        raise StoreTemporary(f"{what}: bytes {offset} to {last} were asked, another range was answered.")
    if int(found[2]) < last:
        raise StoreTemporary(f"{what}: the object ends before byte {last}.")
