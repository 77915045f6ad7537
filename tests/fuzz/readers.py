"""Every reader of bytes from elsewhere, with bytes that the package itself has just written.

Rules:
* A reader is one entry of :func:`all_readers`. Its refusals are what its docstring promises, never ``Exception``.
* Where a checksum covers the bytes, a second entry makes the checksum right: whoever writes the file writes it too.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from ckptmirror import CheckpointManager, use_keys
from ckptmirror.cli._timeline_drawing import draw
from ckptmirror.cli._timeline_page import page
from ckptmirror.config import load_settings
from ckptmirror.core import names, signing
from ckptmirror.core.codec import (
    attempts_from_bytes,
    health_from_bytes,
    health_to_bytes,
    meta_from_bytes,
    meta_or_tombstone_from_bytes,
    meta_to_bytes,
    tombstone_to_bytes,
)
from ckptmirror.core.errors import (
    BrokenMeta,
    BrokenTable,
    CheckpointNotFound,
    ConfigError,
    IntegrityError,
    KindMismatch,
    StoreTemporary,
    TableLocked,
    UsageError,
)
from ckptmirror.core.journal import entries_from_lines
from ckptmirror.core.legacy_meta import legacy_meta_from_bytes
from ckptmirror.core.model import SIGNS, AttemptHealth, Digest, Kind, Meta, Tombstone
from ckptmirror.core.sealed_json import seal
from ckptmirror.core.tensor_proof import read_list
from ckptmirror.flow.places.attempt_lists import attempts_here
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, _Memory
from ckptmirror.flow.places.reference import locate
from ckptmirror.flow.places.resolve import list_checkpoints, resolve_checkpoint_reference
from ckptmirror.flow.retention.reconcile import BRINGING_NAME, being_brought
from ckptmirror.flow.save.emergency_files import note_path, read_note
from ckptmirror.formats import dcp_metadata
from ckptmirror.formats.dcp_metadata import loads_metadata
from ckptmirror.formats.dcp_read import read_full_directory
from ckptmirror.formats.legacy import read_legacy
from ckptmirror.formats.rank_files import RankFiles
from ckptmirror.formats.versions import from_text, plain_model, versions_in
from ckptmirror.formats.weights_only_values import decode
from ckptmirror.local.lock import read_owner
from ckptmirror.local.root_id import read_root_id
from ckptmirror.local.status_file import is_writer_alive, read_status_file
from ckptmirror.local.table_place import table_path
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.local.uploads import records as table_records
from ckptmirror.observe.history import History
from ckptmirror.observe.timeline import build_timeline
from ckptmirror.stores import normalise_url
from ckptmirror.stores.locations import BucketLocation
from ckptmirror.stores.memory import MemoryStore
from ckptmirror.untrusted import described_tensors
from ckptmirror.untrusted.tensor_files import load_bytes, load_pt
from tests.fuzz.answers import readers_of_answers
from tests.fuzz.fuzzing import Reader
from tests.fuzz.mutations import change_json, change_lines, opcode_changes
from tests.kit import formats, legacy
from tests.kit.hostile_files import Record, archive
from tests.kit.training import new_state, train

STEP = 3
_SOURCES = tuple(
    f"{Path(file).parents[depth]}/" for file, depth in ((__file__, 2), (torch.__file__, 1), (os.__file__, 0))
)


def all_readers(folder: Path) -> list[Reader]:
    """Save, mirror and snapshot a small run below ``folder``, and return the readers with its files as seeds."""
    run = _Run(folder)
    return [
        *_of_json(run),
        *_of_notes(run),
        *_of_tensors(run),
        *_of_tables(run),
        *_of_texts(run),
        *readers_of_answers(),
    ]


class _Run:
    """A small run: two saves in both kinds, on a mirror too, an emergency snapshot, a legacy checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.root, self.mirror = folder / "root", folder / "mirror"
        self.url = f"file://{self.mirror}"
        state = new_state()
        with CheckpointManager(self.root, [self.url], kinds=("dcp", "model")) as manager:
            manager.resume(state)
            for step in (2, STEP):
                train(state, step)
                manager.save(step, state, metrics={"loss": 0.5}, fields={"note": ["x", None]}).wait()
            manager.wait(timeout_s=60)
            manager.save_emergency_checkpoint(STEP + 1, state)
            self.status = (self.root / names.STATUS_NAME).read_bytes()
        self.name = names.SaveName(STEP)
        self.legacy = folder / "legacy"
        legacy.save_legacy(self.legacy, STEP)
        self.table_bytes = _table(self.root / names.TABLE_NAME, folder / "copy.sqlite")

    def bytes_of(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def metas(self) -> list[bytes]:
        places = [*self.root.glob("meta_*.json"), *self.root.glob("emergency*/meta*.json"), *self.mirror.glob("meta_*")]
        return [path.read_bytes() for path in places]


def _table(path: Path, copy: Path) -> bytes:
    """The table with its log in it, in the fewest pages."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))
    return copy.read_bytes()


def _written(name: str) -> Callable[[bytes], Path]:
    """Write the bytes to a file of the working directory; return the directory."""

    def write(data: bytes) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return Path.cwd()

    return write


# -- JSON ---------------------------------------------------------------------------------------------------


def _of_json(run: _Run) -> Iterator[Reader]:
    stone = tombstone_to_bytes(Tombstone("5" * 32, 2, ("dcp",), "keep_last", "2026-01-01T00:00:00Z"))
    metas = run.metas()
    lists = [run.bytes_of(names.ATTEMPTS_NAME), (run.mirror / names.WRITER_NAME).read_bytes()]
    yield Reader("meta", [*metas, stone], meta_or_tombstone_from_bytes, (BrokenMeta,), mutate=change_json)
    yield Reader(
        "meta or tombstone, resealed", [*metas, stone], _meta, (BrokenMeta,), prepare=_sealed, mutate=change_json
    )
    yield Reader(
        "copy of a signed meta, resealed",
        [_copy_of_signed(run)],
        _demanding_signatures,
        (BrokenMeta,),
        prepare=_sealed,
        mutate=change_json,
    )
    yield Reader("list of attempts", lists, attempts_from_bytes, (BrokenMeta,), mutate=change_json)
    health = [health_to_bytes(AttemptHealth("4" * 32, {"6" * 32: frozenset(SIGNS), "7" * 32: frozenset()}))]
    yield Reader("health of attempts", health, health_from_bytes, (BrokenMeta,), mutate=change_json)
    yield Reader(
        "health of attempts, resealed", health, health_from_bytes, (BrokenMeta,), prepare=_sealed, mutate=change_json
    )
    tensors = [path.read_bytes() for path in (*run.root.glob("tensors_*"), *run.root.glob("emergency*/tensors_*"))]
    yield Reader("list of tensors", tensors, read_list, (BrokenMeta,), mutate=change_json)
    yield Reader(
        "list of attempts, resealed", lists, attempts_from_bytes, (BrokenMeta,), prepare=_sealed, mutate=change_json
    )
    yield Reader(
        "root with a meta, resealed",
        [run.bytes_of(run.name.meta)],
        _list_root,
        (CheckpointNotFound, KindMismatch, IntegrityError),
        prepare=_root_of(run, run.name.meta),
        mutate=change_json,
    )
    yield Reader(
        "root with a list of attempts, resealed",
        [run.bytes_of(names.ATTEMPTS_NAME)],
        lambda root: (_list_root(root), attempts_here(root)),
        (CheckpointNotFound, KindMismatch, IntegrityError),
        prepare=_root_of(run, names.ATTEMPTS_NAME),
        mutate=change_json,
    )
    yield Reader(
        "mirror with a meta, resealed",
        [(run.mirror / run.name.meta).read_bytes(), stone],
        mirror_catalog,
        (IntegrityError,),
        prepare=_mirror_of(run, run.name.meta),
        mutate=change_json,
    )
    yield Reader(
        "mirror with a list of attempts, resealed",
        [(run.mirror / names.WRITER_NAME).read_bytes()],
        mirror_catalog,
        (IntegrityError,),
        prepare=_mirror_of(run, names.WRITER_NAME),
        mutate=change_json,
    )
    yield Reader(
        "legacy meta",
        [next(run.legacy.rglob("meta.json")).read_bytes()],
        _legacy_meta,
        (BrokenMeta,),
        mutate=change_json,
    )
    yield Reader("versions of modules", _versions(run), lambda data: from_text(data, "x"), (IntegrityError,),
                 mutate=change_json)  # fmt: skip


def _meta(data: bytes) -> None:
    found = meta_or_tombstone_from_bytes(data)
    if not isinstance(found, Tombstone):
        meta_from_bytes(data)
        repr(found.size_bytes)


_SIGN = Ed25519PrivateKey.from_private_bytes(b"1" * 32)


def _is_signed(data: bytes, signature: bytes) -> bool:
    try:
        _SIGN.public_key().verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _copy_of_signed(run: _Run) -> bytes:
    """What a stage writes that has no key: it carries the signed meta."""
    meta = meta_from_bytes(run.bytes_of(run.name.meta))
    hashed = [replace(one, digest=_with_hashes(one.digest)) for one in meta.artifacts]
    before = signing.set_current(signing.Keys(sign=_SIGN.sign))
    signed = meta_to_bytes(replace(meta, artifacts=tuple(hashed)))
    signing.set_current(signing.Keys(is_signed=_is_signed))
    copy = meta_to_bytes(replace(meta_from_bytes(signed), staged_from="gs://bucket/run", partial=True))
    signing.set_current(before)
    return copy


def _with_hashes(digest: Digest) -> Digest:
    return replace(digest, hashes=tuple(b"h" * 32 for _ in digest.blocks))


def _demanding_signatures(data: bytes) -> None:
    before = signing.set_current(signing.Keys(is_signed=_is_signed))
    try:
        meta_from_bytes(data)
    finally:
        signing.set_current(before)


def _sealed(data: bytes) -> bytes:
    """Make the checksum right, unless there is no object."""
    try:
        document = json.loads(data)
        fields = {key: value for key, value in document.items() if key not in ("checksum", "format", "version")}
        return seal(document["format"], fields, document["version"])
    except (ValueError, RecursionError, AttributeError, KeyError, BrokenMeta):
        return data


def _root_of(run: _Run, name: str) -> Callable[[bytes], Path]:
    def make(data: bytes) -> Path:
        if not Path("root").exists():
            shutil.copytree(run.root, "root", symlinks=True)
        (Path("root") / name).write_bytes(_sealed(data))
        return Path("root").absolute()

    return make


def _list_root(root: Path) -> None:
    list_checkpoints(root)
    resolve_checkpoint_reference(root)


def _mirror_of(run: _Run, name: str) -> Callable[[bytes], Mirror]:
    objects = {
        str(path.relative_to(run.mirror)): path.read_bytes()
        for path in run.mirror.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }

    def make(data: bytes) -> Mirror:
        store = MemoryStore(BucketLocation("memory", "fuzz", str(len(objects))))
        for one in list(store.list()):
            store.delete(one.name, generation=one.generation)
        for path, content in (objects | {name: _sealed(data)}).items():
            store.write(path, content, if_generation=0)
        return Mirror(store.url, True, store)

    return make


def _legacy_meta(data: bytes) -> None:
    found = legacy_meta_from_bytes(data)
    repr((found.training_config, found.metrics, found.step))


def _versions(run: _Run) -> list[bytes]:
    extra = load_pt(run.root / run.name.extra(0))
    texts = [entry[1] for key, value in extra.items() if "version" in str(key) for entry in value]
    return [text.encode() for text in texts] or [b'{"":{"version":1},"0":{"version":1}}']


# -- notes in a root ----------------------------------------------------------------------------------------


def _of_notes(run: _Run) -> Iterator[Reader]:
    inodes = [run.root.stat().st_ino, (run.root / names.LOCK_NAME).stat().st_ino]
    events = run.bytes_of(names.EVENTS_NAME)
    notes = {
        "status": (names.STATUS_NAME, run.status, lambda root: is_writer_alive(read_status_file(root))),
        "lock": (
            names.LOCK_NAME,
            run.bytes_of(names.LOCK_NAME) or b'{"pid": 1, "host": "a", "since": "b"}',
            read_owner,
        ),
        "root id": (
            f"{names.CONTROL_DIR}/root.json",
            json.dumps({"id": "a" * 32, "is_first": True, "inodes": inodes}).encode(),
            _root_id,
        ),
        "save that is brought": (BRINGING_NAME, b'{"save_id": "' + b"a" * 32 + b'"}', being_brought),
    }
    for what, (path, seed, read) in notes.items():
        yield Reader(
            what,
            [seed],
            read,
            prepare=_written(path),
            mutate=change_json,
            opens=("/proc/",),
            events=frozenset({"socket.gethostname", "os.kill"}),  # is the writer alive?
        )
    yield Reader(
        "place of the table",
        [json.dumps({"host": "a", "path": str(run.root.absolute() / names.TABLE_NAME)}).encode()],
        table_path,
        (ConfigError,),
        prepare=_written(names.TABLE_NOTE_NAME),
        mutate=change_json,
    )
    yield Reader(
        "note of an emergency",
        [b'{"directory": "emergency_000003_20260102T030405Z", "persistent_dir": "/x"}'],
        lambda root: read_note(note_path(root, "a" * 32)),
        (ValueError, IntegrityError),  # its docstring says so
        prepare=_written(str(note_path(Path(), "a" * 32))),
        mutate=change_json,
    )
    note = next((run.root / names.CONTROL_DIR).glob("mirror-*.json"))
    yield Reader(
        "note of a mirror's identity, resealed",
        [note.read_bytes()],
        lambda root: _Memory(root, _NoTable(), run.url).recall(),  # type: ignore[arg-type]
        (StoreTemporary,),
        prepare=lambda data: _written(f"{names.CONTROL_DIR}/{note.name}")(_sealed(data)),
        mutate=change_json,
    )
    yield Reader("journal", [events, events[:3000]], _journal, (), mutate=change_lines)


class _NoTable:
    """A table that remembers nothing, so that the note alone counts."""

    def mirror_identity(self, _: str) -> None:
        return None


def _root_id(root: Path) -> object:
    (root / names.LOCK_NAME).exists()
    return read_root_id(root)


def _journal(data: bytes) -> None:
    told, broken = entries_from_lines(data.split(b"\n"))
    timeline = build_timeline(History(tuple(told), (), (), broken, ()))
    page(timeline, "a run", draw(timeline, "a run"))


# -- tensors ------------------------------------------------------------------------------------------------


def _of_tensors(run: _Run) -> Iterator[Reader]:
    name, refused = run.name, (IntegrityError,)
    files = {
        "rank file": next(run.root.glob("emergency*/rank0.pt")).read_bytes(),  # it holds everything
        "tensor file": _zoo(),
        "legacy model file": _legacy_model(run),
    }
    pickled = {what: _records(data)["data.pkl"] for what, data in files.items()}
    change = opcode_changes(list(pickled.values()), sorted(described_tensors._NAMES))
    yield Reader("tensor file", [run.bytes_of(name.optim(0)), run.bytes_of(name.model)], _tensors, refused)
    for what, read, refusals in (
        ("rank file", _rank_file, refused),
        ("tensor file", lambda path: decode(load_pt(path)), refused),
        ("legacy model file", lambda path: read_legacy(path, "model", None), (IntegrityError, UsageError)),
    ):
        yield Reader(
            f"{what}, its pickle", [pickled[what]], read, refusals, prepare=_packed_file(files[what]), mutate=change
        )
    yield from _loads(run.root.parent, change)
    directories = [run.root / name.dcp_dir, next(run.legacy.glob("dist_ckpt*"))]
    metadata = [(one / ".metadata").read_bytes() for one in directories]
    of_metadata = opcode_changes(metadata, ["torch.float32", "pathlib.PosixPath", "builtins.getattr"])
    yield Reader("DCP metadata", metadata, _metadata, refused, mutate=of_metadata)
    for one, what in zip(directories, ("DCP directory", "legacy DCP directory"), strict=True):
        read: Callable[[Path], object] = read_full_directory
        if what.startswith("legacy"):
            read = _legacy_directory
        yield Reader(
            f"{what}, its metadata",
            [(one / ".metadata").read_bytes()],
            read,
            (IntegrityError, UsageError),
            prepare=_directory(one, ".metadata"),
            mutate=of_metadata,
        )
    data = next((run.root / name.dcp_dir).glob("*.distcp"))
    yield Reader(
        "DCP directory, its tensors",
        [data.read_bytes()],
        read_full_directory,
        (IntegrityError, UsageError),
        prepare=_directory(directories[0], data.name),
    )


def _loads(folder: Path, change: Callable[[bytes, int, int], bytes]) -> Iterator[Reader]:
    """Loads into a live training, of which one file says something else."""
    state = formats.make_state()
    formats.train(state, 1)
    for kind in formats.KINDS:
        root = folder / f"save-{kind}"
        root.mkdir()
        meta = formats.save(kind, root, state)
        for path in root.rglob("*.pt"):
            name = path.relative_to(root)
            yield Reader(
                f"load of kind {kind}, the pickle of {name.name}",
                [_records(path.read_bytes())["data.pkl"]],
                functools.partial(_load, kind, meta),
                (IntegrityError, UsageError, KindMismatch),
                prepare=_copied(root, name),
                mutate=change,
                opens=_SOURCES,  # torch remembers from which lines a generator was seeded
                events=frozenset({"object.__setattr__"}),
            )


def _load(kind: Kind, meta: Meta, root: Path) -> None:
    formats.load(kind, root, meta, formats.make_state())


def _copied(source: Path, name: Path) -> Callable[[bytes], Path]:
    make = _packed_file((source / name).read_bytes(), str(Path("save", name)))

    def copy(data: bytes) -> Path:
        if not Path("save").exists():
            shutil.copytree(source, "save")
        make(data)
        return Path("save").absolute()

    return copy


def _records(data: bytes) -> dict[str, bytes]:
    from ckptmirror.untrusted.archives import records_of

    found = records_of(lambda offset, count: data[offset : offset + count], len(data))
    return {name: data[one.offset : one.offset + one.size_bytes] for name, one in found.items()}


def _packed_file(data: bytes, name: str = "file.pt") -> Callable[[bytes], Path]:
    """Put a pickle into an archive beside the tensors of this one."""
    rest = [Record(name, data) for name, data in _records(data).items() if name != "data.pkl"]
    write = _written(name)
    return lambda pickled: write(archive(Record("data.pkl", pickled), *rest)) / name


def _zoo() -> bytes:
    """What plain torch writes for every sort of value that is read."""
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    model = torch.nn.Linear(2, 3)
    values: dict[Any, Any] = {
        "views": [base[1:3], base.t(), base[:, 2], torch.empty(0, 3), torch.tensor(3.5).expand(2, 2)],
        "dtypes": [base.to(dtype)[:1] for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64)],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "sparse": base.relu().to_sparse(),
        "meta": torch.empty(5, 6, device="meta"),
        "state": model.state_dict(),
        "parameter": model.weight,
        "plain": [{1, 2}, Counter("aab"), 2 + 1j, b"bytes", bytearray(b"more"), (1, (2.5, None)), 1 << 70, "é"],
        3: {(1, "a"): torch.float16, True: torch.Size([2, 3])},
    }
    torch.save(values, stream := io.BytesIO())
    return stream.getvalue()


def _tensors(data: bytes) -> None:
    model, _ = plain_model(load_bytes(data, "x"), "x")
    decode(model)


def _rank_file(path: Path) -> None:
    tree = RankFiles({0: path}, 0).full_value(())
    if isinstance(tree, dict):
        versions_in(tree, ("model",))


def _legacy_model(run: _Run) -> bytes:
    path = run.legacy / "model_000003.pt"
    if not path.exists():
        model, optimizer, scheduler = legacy.make_training()
        torch.save({**legacy.named(model, optimizer), "scheduler": scheduler.state_dict(), "step": STEP}, path)
    return path.read_bytes()


def _metadata(data: bytes) -> None:
    metadata = loads_metadata(data, "x")
    dcp_metadata.check_entries(metadata, "x")
    names = {info.relative_path for info in metadata.storage_data.values()}
    dcp_metadata.check_ranges(metadata, dict.fromkeys(names, 1 << 40), "x")


def _directory(source: Path, name: str) -> Callable[[bytes], Path]:
    def make(data: bytes) -> Path:
        if not Path("dcp").exists():
            shutil.copytree(source, "dcp")
        Path("dcp", name).write_bytes(data)
        return Path("dcp").absolute()

    return make


def _legacy_directory(path: Path) -> object:
    return read_legacy(path, "dcp", None)


# -- the table ----------------------------------------------------------------------------------------------


def _of_tables(run: _Run) -> Iterator[Reader]:
    yield Reader(
        "table",
        [run.table_bytes],
        _whole_table,
        (BrokenTable, ConfigError, TableLocked),
        prepare=_fresh_table,
        opens=("/proc/",),
        events=frozenset(f"ctypes.{what}" for what in _CALLS_OF_C),
    )
    with UploadsTable.open(run.root / names.TABLE_NAME, read_only=True) as table:
        record, save = table.records()[0], table.saves()[0]
    for what, columns, read in (
        ("upload", table_records.record_to_columns(record), table_records.record_from_row),
        ("save", table_records.save_to_columns(save), table_records.save_from_row),
    ):
        seed = json.dumps([value for name, value in columns.items() if name != "row_crc"]).encode()
        more = (1,) if what == "upload" else ()
        yield Reader(f"row of the table: {what}", [seed], read, (), prepare=_row(more), mutate=change_json)


_CALLS_OF_C = ("dlopen", "dlsym", "call_function", "create_string_buffer", "set_errno", "get_errno")  # statfs


def _fresh_table(data: bytes) -> Path:
    for path in Path().iterdir():
        path.unlink()
    Path("uploads.db").write_bytes(data)
    return Path("uploads.db").absolute()


def _whole_table(path: Path) -> None:
    with UploadsTable.open(path, read_only=True) as table:
        known = table.identity()
        table.check_pages()
        for ask in (table.saves, table.records, table.counts, table.mirrors, table.unasked, table.history):
            ask()
        if known is not None:
            known.is_directory(path.parent)


def _row(more: tuple[int, ...]) -> Callable[[bytes], tuple[Any, ...]]:
    """Make a row as SQLite gives it, with the checksum that belongs to it."""

    def make(data: bytes) -> tuple[Any, ...]:
        try:
            values = json.loads(data)
            values = [_of_sqlite(value) for value in values] if isinstance(values, list) else []
        except (ValueError, RecursionError):
            values = []
        plain = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in values]
        return (1, *values, table_records.canonical_crc(plain), *more)

    return make


def _of_sqlite(value: Any) -> int | float | bytes | None:
    if isinstance(value, int):
        return max(-(1 << 63), min(value, (1 << 63) - 1)) + 0
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return json.dumps(value).encode() if isinstance(value, list | dict) else value


# -- texts: settings, references, names ---------------------------------------------------------------------


_SETTINGS = b"""
root = "run"
mirrors = ["gs://bucket/run", {url = "file:///mnt/x", required = false}]
state_dir = "state"
workers_per_mirror = 2
share_downloads = true
[retention]
keep_last = 3
keep_every = 1000
"""
_URLS = (
    *(
        b"gs://bucket/prefix/meta_000200.json",
        b"file:///mnt/a%20b/model_000200.pt",
        b"s3://bucket/a?b#c",
        b"memory://x/y",
    ),
    *(
        b"https://storage.googleapis.com/bucket/o",
        b"gcsfs+gs://b/p",
        b"/abs/path",
        b"./model_000200.pt",
        b"latest",
        b"~/x",
    ),
)
_NAMES = (
    *(
        b"200",
        b"meta_000200.json",
        b"model_000200_1f0c9a2e.pt",
        b"optim_000200_rank3.pt",
        b"checkpoint_000200",
        b"latest",
    ),
    *(b"emergency_000003_20260102T030405Z", b".meta_000200.json.1f0c9a2e.tmp", b"dist_ckpt_000003/__0_0.distcp"),
)


def _of_texts(run: _Run) -> Iterator[Reader]:
    project = b"[project]\nname = 'x'\n[tool.ckptmirror]\nroot = 'a'\n"
    yield Reader(
        "settings",
        [
            _SETTINGS,
            b'root = "a"\nkinds = ["dcp"]\n',
            b'mirrors = ["s3://b/x"]\n',
            b'mirrors = ["x"]\n',
            b"[retention]\nkeep_last = 1\n",
        ],
        lambda folder: load_settings(directory=folder, environ={}),
        (ConfigError,),
        prepare=_written("ckptmirror.toml"),
    )
    yield Reader(
        "settings in pyproject.toml",
        [project, _SETTINGS.replace(b"[retention]", b"[tool.ckptmirror.retention]")],
        lambda folder: load_settings(directory=folder, environ={"HOME": str(folder)}),
        (ConfigError,),
        prepare=_stopped_here("pyproject.toml"),
    )
    private = _SIGN.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = _SIGN.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for what, seed, given in (("private", private, "signing_key"), ("public", public, "verify_keys")):
        yield Reader(f"{what} key", [seed], functools.partial(_use_key, given), (ConfigError,), prepare=_key_file)
    yield Reader("URL", _URLS, normalise_url, (ConfigError,), prepare=_text)
    yield Reader("reference", [*_URLS, *_NAMES], locate, (UsageError, CheckpointNotFound), prepare=_text, opens=("/",))
    found = [str(path.relative_to(run.root)).encode() for path in _files_in(run.root)]
    yield Reader("name", [*_NAMES, *found], _names, (UsageError,), prepare=_text)
    yield Reader(
        "directory with these names",
        [b"\n".join(found), b"\n".join(_NAMES)],
        lambda folder: list_checkpoints(folder),
        (CheckpointNotFound, IntegrityError),
        prepare=_files_named({str(path.relative_to(run.root)): path.read_bytes() for path in _files_in(run.root)}),
    )


def _key_file(data: bytes) -> Path:
    path = _written("run.pem")(data) / "run.pem"
    path.chmod(0o600)
    return path


def _use_key(given: str, path: Path) -> None:
    try:
        use_keys(**{given: path if given == "signing_key" else [path]})
    finally:
        signing.set_current(signing.Keys())


def _text(data: bytes) -> str:
    return os.fsdecode(data)  # as an argument of a program comes


def _stopped_here(name: str) -> Callable[[bytes], Path]:
    write = _written(name)

    def make(data: bytes) -> Path:
        Path(".git").mkdir(exist_ok=True)
        return write(data)

    return make


def _names(text: str) -> None:
    for parse in (names.parse_name, names.parse_artifact_path):
        parse(text)
    if (parsed := names.parse_name(text)) is not None:
        assert names.build_name(parsed) == text
    names.parse_step(text)


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _files_named(contents: Mapping[str, bytes]) -> Callable[[bytes], Path]:
    def make(data: bytes) -> Path:
        folder = Path("names").absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in map(os.fsdecode, data.split(b"\n")[:40]):
            parts = [part for part in name.split("/") if part not in ("", ".", "..") and "\0" not in part]
            path = folder.joinpath(*parts)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents.get(name, b"{}"))
            except OSError:  # no such name is possible, or another one is in the way
                continue
        return folder

    return make
