"""The tables that ``make scale`` prints: a row for each size of job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from tests.scale.connections import count_open_files
from tests.scale.dcp_pieces import TENSORS, measure_pieces
from tests.scale.job import SHARD_BYTES, Shape
from tests.scale.measure import Documents, Measured

_Row = TypeVar("_Row")
_Columns = Sequence[tuple[str, Callable[[_Row], str]]]


def size_text(size_bytes: float) -> str:
    """A size with three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size_bytes < 1000 or unit == "TB":
            return f"{size_bytes:.3g} {unit}" if size_bytes < 100 else f"{size_bytes:.0f} {unit}"
        size_bytes /= 1000
    raise AssertionError("every size has a unit")


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _state_at_limit_bytes(one: Documents) -> float:
    """How large the state of all ranks is when the meta reaches its limit."""
    return META_LIMIT_BYTES / one.meta_bytes * one.ranks * SHARD_BYTES


SAVE: _Columns[Measured] = (
    ("nodes", lambda one: _count(one.nodes)),
    ("writes", lambda one: _count(one.save.writes)),
    ("reads", lambda one: _count(one.save.reads)),
    ("listing pages", lambda one: _count(one.save.pages)),
    ("files sent", lambda one: size_text(one.save.artifact_bytes)),
    ("metas sent", lambda one: size_text(one.save.sent_bytes)),
    ("received", lambda one: size_text(one.save.received_bytes)),
    ("most writes/s", lambda one: _count(one.save_writes_at_second)),
    ("most reads/s", lambda one: _count(one.save_reads_at_second)),
    ("changes of one object/s", lambda one: _count(one.fastest_change[1])),
)
START: _Columns[Measured] = (
    ("nodes", lambda one: _count(one.nodes)),
    ("writes", lambda one: _count(one.from_disks.asked.writes)),
    ("reads", lambda one: _count(one.from_disks.asked.reads)),
    ("listing pages", lambda one: _count(one.from_disks.asked.pages)),
    ("of these the leader's", lambda one: _count(one.from_disks.leader.pages)),
    ("received", lambda one: size_text(one.from_disks.asked.received_bytes)),
    ("small files brought", lambda one: _count(one.from_disks.brought.reads)),
    ("leader's memory", lambda one: size_text(one.from_disks.peak_bytes)),
    ("leader's CPU", lambda one: f"{one.from_disks.choice_s:.2g} s"),
    ("from the mirror: reads to bring all", lambda one: _count(one.from_mirror.brought.reads)),
)
RANKS: _Columns[Measured] = (
    ("nodes", lambda one: _count(one.nodes)),
    ("a save: messages", lambda one: _count(one.save_traffic.messages)),
    ("rank 0 receives", lambda one: size_text(one.save_traffic.received_bytes)),
    ("rank 0 sends", lambda one: size_text(one.save_traffic.sent_bytes)),
    ("rank 0's CPU", lambda one: f"{one.save_traffic.cpu_s:.2g} s"),
    ("a start: messages", lambda one: _count(one.start_traffic.messages)),
    ("rank 0 receives ", lambda one: size_text(one.start_traffic.received_bytes)),
    ("rank 0 sends ", lambda one: size_text(one.start_traffic.sent_bytes)),
    ("largest answer", lambda one: size_text(one.start_traffic.answer_bytes)),
)
METAS: _Columns[Documents] = (
    ("nodes", lambda one: _count(one.nodes)),
    ("part of a node", lambda one: size_text(one.part_bytes)),
    ("meta of all", lambda one: size_text(one.meta_bytes)),
    ("read the parts, merge, write", lambda one: f"{one.merge_s:.2g} s"),
    ("memory for that", lambda one: size_text(one.memory_bytes)),
    ("read the meta", lambda one: f"{one.read_s:.2g} s"),
    ("state of a meta of 64 MiB", lambda one: f"{_state_at_limit_bytes(one) / (1 << 40):.2g} TiB"),
)


def limits(shapes: Sequence[Shape]) -> str:
    """What needs no running job: open files, and DCP's ``.metadata``; for each number of nodes and ranks."""
    pieces = measure_pieces()
    ranks_of = [(shape.nodes, shape.ranks) for shape in shapes]
    (eager, _), (first, other) = count_open_files(lazy=False), count_open_files(lazy=True)
    files = [
        ["nodes", "open files of a rank", "with TORCH_GLOO_LAZY_INIT=1: of rank 0", "of another rank"],
        *([_count(nodes), *(_count(one.at(ranks)) for one in (eager, first, other))] for nodes, ranks in ranks_of),
    ]
    title = f"of {TENSORS:,} tensors, sharded over all ranks"
    metadata = [
        ["nodes", f"`.metadata` {title}", "CPU time to read it"],
        *(
            [
                _count(nodes),
                size_text(pieces.bytes * TENSORS * ranks),
                f"{pieces.read_s * TENSORS * ranks:.2g} s",
            ]
            for nodes, ranks in ranks_of
        ),
    ]
    return f"Connections\n\n{_rows(files)}\n\nDCP's metadata\n\n{_rows(metadata)}"


def tables(measured: Sequence[Measured], documents: Sequence[Documents]) -> str:
    """All tables, in Markdown."""
    named = (("A save", SAVE), ("A start from the disks", START), ("Between ranks", RANKS))
    several = [one for one in measured if one.nodes > 1]  # the exchanges were recorded between nodes
    found = [f"{n}\n\n{_table(columns, several if columns is RANKS else measured)}" for n, columns in named if measured]
    return "\n\n".join([*found, f"Metas\n\n{_table(METAS, documents)}"])


def _table(columns: _Columns[_Row], measured: Sequence[_Row]) -> str:
    return _rows([[name.strip() for name, _ in columns], *([text(one) for _, text in columns] for one in measured)])


def _rows(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---:"] * len(head), *rest))
