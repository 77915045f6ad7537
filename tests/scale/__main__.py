"""``make scale``: what a save and a start cost a job of 1 to 1,000 nodes, beside the limits of Cloud Storage.

python -m tests.scale [--nodes N] [--ranks-per-node 8] [--limits] [--directory DIR] [--json]

The real code runs, for every node of the job, against a service in memory that counts. A thousand nodes take hours and
5 GB of DIR (default: /dev/shm), so by default only what needs no running job is measured for them: that takes seconds.
Counts and bytes do not depend on the machine; times and memory do.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.scale.channel import SmallJob
from tests.scale.job import SHARD_BYTES, Shape
from tests.scale.measure import Measured, measure, measure_documents
from tests.scale.table import limits, tables

_NODES = (1, 2, 4, 10, 100)
_MOST_NODES = 1000
_FILES_OF_NODE = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, action="append", help=f"a size of job (default: {_NODES})")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--limits", action="store_true", help="only what needs no running job")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="for the roots (default: /dev/shm)")
    parser.add_argument("--json", action="store_true", help="everything measured, as JSON")
    given = parser.parse_args(arguments)
    sizes = given.nodes or _NODES
    shapes = [Shape(nodes, given.ranks_per_node) for nodes in given.nodes or (*_NODES, _MOST_NODES)]
    if given.limits:
        print(f"{tables([], [measure_documents(shape) for shape in shapes])}\n\n{limits(shapes)}")
        return
    _allow_open_files(_FILES_OF_NODE * max(sizes) + 200)
    measured: list[Measured] = []
    folder = Path(tempfile.mkdtemp(prefix="ckptmirror-scale-", dir=given.directory))
    try:
        small = SmallJob(folder / "small")
        small.run(1)
        heard = small.run(2)
        for nodes in sizes:
            place = folder / str(nodes)
            place.mkdir()
            measured.append(measure(Shape(nodes, given.ranks_per_node), place, heard))
            shutil.rmtree(place)
            print(f"{nodes} nodes measured", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        print(json.dumps([one.as_json() for one in measured], indent=1))
        return
    print(f"{given.ranks_per_node} ranks on each node, {SHARD_BYTES >> 30} GiB of each rank's state\n")
    documents = [one.documents for one in measured]
    print(tables(measured, documents + [measure_documents(shape) for shape in shapes[len(documents) :]]))
    print(f"\n{limits(shapes)}")


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        sys.exit(f"So many nodes need {count} open files, and this machine allows {hard}: see `ulimit -Hn`.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


if __name__ == "__main__":
    main()
