"""``make bench``: the paths that must be fast, beside their physical limits and beside what one would use instead.

python -m tests.bench [--size-mib 1024] [--rounds 3] [--directory DIR] [--device cuda] [--json]
                      [--only save|load|fetch|upload|stage|memory|start|nodes|fingerprint]

It works in a directory of its own below DIR (default: the one for temporary files), says which kind of disk that is,
and removes it. Trust the ratios, which are taken within a round, more than the figures.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.bench.contest import Measured, table
from tests.bench.fetch import measure_fetch
from tests.bench.fingerprint import measure_fingerprint
from tests.bench.load import measure_load
from tests.bench.memory import measure_memory
from tests.bench.nodes import measure_nodes
from tests.bench.places import describe_disk
from tests.bench.save import measure_save
from tests.bench.startup import measure_startup
from tests.bench.transfer import measure_stage, measure_upload

_ROOM = 6  # so many times the size must be free


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=1024, help="of the state, and of the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        choices=["save", "load", "fetch", "upload", "stage", "memory", "start", "nodes", "fingerprint"],
        action="append",
    )
    parser.add_argument(
        "--directory", type=Path, default=None, help="on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the state that save and load have")
    parser.add_argument("--json", action="store_true", help="everything measured, as JSON")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    size_bytes = given.size_mib * 2**20
    parts: dict[str, Callable[[Path], list[Measured]]] = {
        "save": lambda place: measure_save(place, size_bytes, given.rounds, given.device),
        "load": lambda place: measure_load(place, size_bytes, given.rounds, given.device),
        "fetch": lambda place: measure_fetch(place, size_bytes, given.rounds),
        "upload": lambda place: measure_upload(place, size_bytes, given.rounds),
        "stage": lambda place: measure_stage(place, size_bytes, given.rounds),
        "memory": lambda place: measure_memory(place, size_bytes),
        "start": lambda place: measure_startup(place, given.rounds),
        "nodes": lambda place: measure_nodes(place, size_bytes, given.rounds),
        "fingerprint": lambda place: measure_fingerprint(place, size_bytes, given.rounds),
    }
    measured: list[Measured] = []
    folder = Path(tempfile.mkdtemp(prefix="ckptmirror-bench-", dir=given.directory))
    facts = _facts(folder, given.size_mib, given.rounds)
    try:
        if shutil.disk_usage(folder).free < _ROOM * size_bytes:
            sys.exit(f"{folder} has less than {_ROOM} times {given.size_mib} MiB free: choose another --directory.")
        if not given.json:
            print(", ".join(f"{value}" for value in facts.values()), flush=True)
        for name, part in parts.items():
            if given.only and name not in given.only:
                continue
            place = folder / name
            place.mkdir()
            found = part(place)
            measured += found
            shutil.rmtree(place)
            if not given.json:
                print("\n".join(table(found)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        results = [
            {"what": m.what, "name": m.name, "role": m.role, "unit": m.unit, "samples": m.samples} for m in measured
        ]
        print(json.dumps({**facts, "measured": results}, indent=1))


def _facts(folder: Path, size_mib: int, rounds: int) -> dict[str, str]:
    return {
        "size": f"{size_mib} MiB",
        "rounds": f"{rounds} rounds",
        "disk": describe_disk(folder),
        "cores": f"{os.cpu_count()} cores",
        "load": f"load {os.getloadavg()[0]:.1f} at the start",
        "torch": f"torch {torch.__version__}",
    }


if __name__ == "__main__":
    main()
