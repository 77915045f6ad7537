"""Upload and verified stage of one large file, against the client library and against a bare socket.

Everyone but the bare sockets talks to the same strict server. Files to upload are not in the page cache, as after a
save that went past it. Our upload ends when the mirror has confirmed every checksum and holds the meta; our stage when
the file is verified, fsynced and named. The peers neither ask again nor fsync.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ckptmirror.flow.drain import push
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from tests.bench import socket_loop
from tests.bench.contest import Contestant, Measured, measure
from tests.bench.places import BUCKET, cold, fresh_name, one_file_root, server
from tests.bench.raw_disk import write_raw

__all__ = ["bucket_of", "measure_stage", "measure_upload"]


def bucket_of(url: str) -> Any:
    """Open the server's bucket with the client library."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    client = storage.Client(project="bench", credentials=AnonymousCredentials(), client_options={"api_endpoint": url})
    return client.bucket(BUCKET)


def _timed(what: str, work: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        started, worked = time.perf_counter(), time.process_time()
        work()
        return {what: time.perf_counter() - started, f"{what}: CPU of this process": time.process_time() - worked}

    return run


def measure_upload(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure uploads of one file of ``size_bytes``."""
    path = one_file_root(directory / "root", size_bytes)
    with server(directory / "server") as process, socket_loop.peer("sink") as port:
        bucket = bucket_of(process.url)
        timed = partial(_timed, "upload")

        def ours() -> None:
            report = push(path.parent, f"gs://{BUCKET}/{fresh_name('ours')}")
            assert report.drained.files_done == report.drained.files_total, report

        def library() -> None:
            bucket.blob(fresh_name("library")).upload_from_filename(path, checksum="crc32c", if_generation_match=0)

        def remove() -> None:
            for blob in list(bucket.list_blobs()):
                blob.delete()

        def prepare() -> None:
            cold(path)

        return measure(
            [
                Contestant("bare socket loop", "limit", timed(lambda: socket_loop.send_file(port, path)), prepare),
                Contestant("ckptmirror", "ours", timed(ours), prepare, remove),
                Contestant("upload_from_filename", "peer", timed(library), prepare, remove),
            ],
            rounds,
        )


def measure_stage(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure stages of one file of ``size_bytes``."""
    path = one_file_root(directory / "root", size_bytes)
    url = f"gs://{BUCKET}/run"
    with server(directory / "server") as process, socket_loop.peer("source") as port:
        push(path.parent, url)
        shutil.rmtree(path.parent)
        blob = bucket_of(process.url).blob(f"run/{path.name}")
        place = directory / "staged"
        timed = partial(_timed, "stage")

        def ours() -> None:
            stage_checkpoint_step(url, step=1, dest=place, require_kind="model")

        def remove() -> None:
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

        return measure(
            [
                Contestant("bare socket loop", "limit", timed(lambda: socket_loop.receive(port, size_bytes))),
                Contestant(
                    "raw O_DIRECT write and fsync", "limit", timed(lambda: write_raw(place, size_bytes)), after=remove
                ),
                Contestant("ckptmirror", "ours", timed(ours), after=remove),
                Contestant(
                    "download_to_filename", "peer", timed(lambda: blob.download_to_filename(place)), after=remove
                ),
            ],
            rounds,
        )
