"""Every operation of a gs:// store, by the name that the test server gives it."""

from __future__ import annotations

from ckptmirror.stores.base import Store
from tests.contract.stores_under_test import (
    pattern_bytes,
    upload_of,
)

MIB = 1024 * 1024
DATA = pattern_bytes(20 * MIB)
EVERY = ("object.get", "object.list", "object.delete", "object.media", "upload.multipart", "upload.start", "upload.put")


def ask(store: Store, operation: str) -> None:
    if operation == "object.get":
        store.stat("x")
    elif operation == "object.list":
        list(store.list())
    elif operation == "object.delete":
        store.delete("x", generation=1)
    elif operation == "object.media":
        info = store.stat("x")
        assert info is not None
        store.download("x", generation=info.generation, offset=0, buffer=memoryview(bytearray(1)))
    elif operation == "upload.multipart":
        store.write("new", b"1", if_generation=0)
    else:
        store.upload(upload_of("large", DATA))
