"""The weights alone of a save on a mirror, for an evaluation: ranges of its files, or all of it staged first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptmirror import CheckpointManager, load_checkpoint, stage_checkpoint_step
from ckptmirror.testing import GcsServerProcess
from tests.bench.contest import Contestant, Measured, measure
from tests.bench.places import BUCKET, server, transformer_state

__all__ = ["measure_fetch"]

_SECONDS, _BYTES = "weights of a DCP directory on a mirror", "bytes that left the mirror"


def measure_fetch(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure loading the model of a save of kind dcp, of ``size_bytes`` with its optimizer, from the strict server."""
    url, staged = f"gs://{BUCKET}/run", directory / "staged"
    with server(directory / "server") as process:
        state = transformer_state(size_bytes)
        with CheckpointManager(directory / "root", [url], kinds=("dcp",)) as manager:
            manager.resume(state)
            manager.save(1, state).wait("mirrored")

        def ranges() -> object:
            return load_checkpoint(f"{url}/dcp_000001", exclude=("optimizer", "extra"))

        def all_of_it() -> object:
            found = stage_checkpoint_step(url, step=1, dest=staged, require_kind="dcp")
            return load_checkpoint(found.path, exclude=("optimizer", "extra"))

        def remove() -> None:
            shutil.rmtree(staged, ignore_errors=True)

        found = measure(
            [
                Contestant("ckptmirror, ranges", "ours", _counted(process, ranges)),
                Contestant("stage, then load", "peer", _counted(process, all_of_it), after=remove),
            ],
            rounds,
        )
    for one in found:
        one.unit = "bytes" if one.what == _BYTES else one.unit
    return found


def _counted(process: GcsServerProcess, work: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        process.clear_log()
        started = time.perf_counter()
        work()
        took_s = time.perf_counter() - started
        return {_SECONDS: took_s, _BYTES: sum(entry["response_bytes"] for entry in process.log("object.media"))}

    return run
