"""Peak memory of an upload and of a stage, over the idle of the same process with everything imported.

Each is measured in a process of its own: ``python -m tests.bench.memory WHAT URL PATH`` (started by the bench).
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.bench.contest import Contestant, Measured, measure

__all__ = ["measure_memory"]


def measure_memory(directory: Path, size_bytes: int) -> list[Measured]:
    """Measure uploads and stages of one file of ``size_bytes``."""
    from ckptmirror.flow.drain import push
    from tests.bench.places import BUCKET, one_file_root, server

    path = one_file_root(directory / "root", size_bytes)
    place = directory / "staged"
    with server(directory / "server"):
        push(path.parent, f"gs://{BUCKET}/run")

        def child(what: str, target: Path) -> Callable[[], Mapping[str, float]]:
            def run() -> Mapping[str, float]:
                command = [sys.executable, "-m", "tests.bench.memory", what, str(target), path.name]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                return {f"peak memory over idle: {what.partition(' ')[0]}": json.loads(done.stdout)["bytes"]}

            return run

        def remove() -> None:
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

        upload = [
            Contestant("ckptmirror", "ours", child("upload", path.parent)),
            Contestant("upload_from_filename", "peer", child("upload by the library", path)),
        ]
        stage = [
            Contestant("ckptmirror", "ours", child("stage", place), after=remove),
            Contestant("download_to_filename", "peer", child("stage by the library", place), after=remove),
        ]
        return [
            found for contestants in (upload, stage) for found in measure(contestants, 1, unit="bytes", warm_up=False)
        ]


def _peak_bytes() -> int:
    """The process's peak since :func:`_forget_peak`, or of its whole life where the kernel keeps no other."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    with contextlib.suppress(OSError):  # then the peak of the imports counts as idle, which is little more
        Path("/proc/self/clear_refs").write_text("5")


def _work(what: str, target: Path, file_name: str) -> Callable[[], object]:
    import os

    import google.cloud.storage  # noqa: F401  (part of the idle)

    from ckptmirror.flow.drain import push
    from ckptmirror.flow.fetch.stage import stage_checkpoint_step
    from tests.bench.places import BUCKET
    from tests.bench.transfer import bucket_of

    bucket = bucket_of(os.environ["STORAGE_EMULATOR_HOST"])
    return {
        "upload": lambda: push(target, f"gs://{BUCKET}/again"),
        "stage": lambda: stage_checkpoint_step(f"gs://{BUCKET}/run", step=1, dest=target, require_kind="model"),
        "upload by the library": lambda: bucket.blob("library").upload_from_filename(target, checksum="crc32c"),
        "stage by the library": lambda: bucket.blob(f"run/{file_name}").download_to_filename(target),
    }[what]


def _main(what: str, target: Path, file_name: str) -> None:
    work = _work(what, target, file_name)
    _forget_peak()
    idle = _peak_bytes()
    work()
    print(json.dumps({"bytes": _peak_bytes() - idle}))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
