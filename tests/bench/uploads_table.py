"""Measures journal modes for the pending-uploads table, and the table itself, on the disk that it is pointed at.

    python -m tests.bench.uploads_table [--directory DIR] [--seconds 1.0] [--processes 1 4]

The first part compares SQLite's journal modes on the work of the table: one small row changed per durable commit, by
one process and by several at once. The second gives the table's own figures with 10,000 records. Trust ratios, not
figures: one machine's fsync differs from the next one's. What a mode loses in a power loss is not measured here: see
docs/adr/0001-sqlite-journal-mode.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import apsw

from ckptmirror.core.model import Artifact, Digest
from ckptmirror.local.uploads import UploadsTable

MODES = (("WAL", "FULL"), ("WAL", "NORMAL"), ("DELETE", "FULL"), ("DELETE", "EXTRA"), ("TRUNCATE", "EXTRA"))
ROWS = 1000
BUSY_TIMEOUT_MS = 30_000
MIRROR = "gs://bucket/run"
SAVES, ARTIFACTS = 50, 199


def _connect(path: Path, synchronous: str) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    connection.pragma("synchronous", synchronous)
    return connection


def _commit_for(
    path: Path,
    synchronous: str,
    seconds: float,
    number: int,
    start: Barrier,
    results: multiprocessing.Queue[list[float]],
) -> None:
    connection = _connect(path, synchronous)
    times_ms: list[float] = []
    start.wait(60)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        connection.execute("BEGIN IMMEDIATE")
        row = (len(times_ms) * 7 + number * 131) % ROWS
        # Another note each time: SQLite writes nothing for a row that stays as it is.
        note = f"{number:08d}{len(times_ms):0192d}"
        connection.execute("UPDATE records SET state = ?, note = ? WHERE id = ?", ("uploading", note, row))
        connection.execute("COMMIT")
        times_ms.append((time.perf_counter() - began) * 1000)
    connection.close()
    results.put(times_ms)


def measure_mode(folder: Path, journal: str, synchronous: str, processes: int, seconds: float) -> str:
    """Return one row of the report: commits per second of all processes together, and how long single commits took."""
    path = folder / f"{journal}-{synchronous}-{processes}.db"
    connection = _connect(path, synchronous)
    connection.pragma("journal_mode", journal)
    connection.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, state TEXT, note TEXT)")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO records VALUES (?, 'pending', ?)", ((number, "x" * 200) for number in range(ROWS))
    )
    connection.execute("COMMIT")
    connection.close()
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[float]] = context.Queue()
    start = context.Barrier(processes)
    workers = [
        context.Process(target=_commit_for, args=(path, synchronous, seconds, number, start, results))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    times_ms = sorted(value for _ in workers for value in results.get(timeout=60 + seconds))
    for worker in workers:
        worker.join()
    median_ms, p99_ms = statistics.median(times_ms), times_ms[int(len(times_ms) * 0.99)]
    figures = f"{len(times_ms) / seconds:.0f} | {median_ms:.2f} | {p99_ms:.2f} | {times_ms[-1]:.1f}"
    return f"| {journal} + {synchronous} | {processes} | {figures} |"


def _median_ms(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) * 1000)
    return statistics.median(taken)


def measure_table(folder: Path) -> list[str]:
    """Return the table's own figures with 10,000 records."""
    artifacts = [
        Artifact(f"dcp/__{n}_0.distcp", ("dcp",), n, Digest(1 << 20, n, 4 << 20, (n,))) for n in range(ARTIFACTS)
    ]
    with UploadsTable.open(folder / "uploads.db", create=True) as table:
        numbers = iter(range(SAVES))

        def add() -> None:
            number = next(numbers)
            table.add_save(f"{number:032x}", number, ("dcp",), artifacts, [MIRROR])
            table.release_save(f"{number:032x}")

        lines = [f"add and release a save of {ARTIFACTS} artifacts: {_median_ms(add, SAVES):.1f} ms"]

        def live() -> None:
            claim = table.claim("bench", MIRROR, lease_s=60)
            assert claim is not None
            record = claim.record
            assert record.crc32c is not None
            table.verify(claim, object_name=record.object, generation=1, size_bytes=1 << 20, crc32c=record.crc32c)

        lines.append(f"claim and verify one record: {_median_ms(live, ARTIFACTS - 1):.2f} ms")
        lines.append(f"claim one record: {_median_ms(lambda: table.claim('bench', MIRROR, lease_s=60), 50):.2f} ms")
        nothing = "gs://bucket/with-nothing"
        lines.append(
            f"ask for work where there is none: {_median_ms(lambda: table.claim('b', nothing, lease_s=1), 50):.2f} ms"
        )
        lines.append(f"counts: {_median_ms(table.counts, 20):.2f} ms")
        lines.append(f"standing of one save: {_median_ms(lambda: table.standing('0' * 32), 20):.2f} ms")
        lines.append(f"read and check all 10,000 records: {_median_ms(table.records, 5):.0f} ms")
    lines.append(f"open: {_median_ms(lambda: UploadsTable.open(folder / 'uploads.db').close(), 5):.1f} ms")
    return lines


def main() -> None:
    """Run both parts and print them as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--directory", type=Path, default=None, help="on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each mode works")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="uploads-table-", dir=options.directory))
    try:
        print(f"SQLite {apsw.sqlite_lib_version()}\n")
        print("| mode | processes | commits/s | median ms | p99 ms | longest ms |\n|---|---|---|---|---|---|")
        for processes in options.processes:
            for journal, synchronous in MODES:
                print(measure_mode(folder, journal, synchronous, processes, options.seconds), flush=True)
        print()
        for line in measure_table(folder):
            print("*", line, flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
