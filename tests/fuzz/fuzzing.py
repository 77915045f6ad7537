"""Gives readers bytes that nobody meant to write, and keeps the bytes with which a reader did what it must not do.

Rules:
* A reading may end in a value or in one of the reader's own refusals. Anything else is a finding: another exception,
  5 s of CPU, 256 MiB, a death, a minute without an end, a changed file, and every action that Python audits (a file
  opened elsewhere, a process, a connection, a first import, ...) which is not on the list of what a reading needs.
* atheris leads the bytes towards code that they have not reached yet. It works in a child process, so that bytes which
  kill it can be named: the child notes each input in shared memory before it reads it.
* Memory is limited by RLIMIT_DATA, which counts what a reading allocates, touched or not. RLIMIT_AS would also count
  the gigabytes that torch maps, and files that are mapped only to be read.
* Time is CPU time, so that a busy machine makes no finding.
* A finding counts when it can be repeated in a new process. It is shortened there, and kept with what it did.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import mmap
import os
import re
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from encodings import utf_16_be, utf_16_le, utf_32_be, utf_32_le  # noqa: F401  those in which JSON may be written
from pathlib import Path
from typing import Any

__all__ = ["Finding", "Fuzzed", "Reader", "fuzz", "repeat"]

CPU_S = 5.0
MEMORY_BYTES = 256 << 20
_STALLED_S = 60.0  # without an input that ends, and without 5 s of CPU: it waits for something
_SHORTEN_S = 10.0
_SHARED_BYTES = 4 << 20
_LONGEST_BYTES = 256 << 10
_HEADER = struct.Struct("<QQ")
# What a reading needs of all that Python audits. "open" is judged by path and mode.
_ALLOWED_EVENTS = frozenset(
    {"open", "os.listdir", "os.scandir", "glob.glob", "pathlib.Path.glob", "pathlib.Path.rglob", "mmap.__new__"}
    | {"builtins.id", "sys._getframe", "object.__getattr__", "ctypes.cdata", "ctypes.cdata/buffer"}
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, eq=False)
class Reader:
    """A reader of bytes from elsewhere.

    Attributes:
        name: For people.
        seeds: Bytes as they are written; the first are read well.
        read: What is tested.
        refusals: The errors by which it may refuse bytes.
        prepare: Turns bytes into what ``read`` takes, for example a file in the working directory; not tested.
        mutate: Changes bytes (at most this many, with this seed); None leaves it to atheris.
        opens: Files elsewhere that it may read: a beginning of their paths.
        events: What Python audits and this reader may do beside.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[Any], object]
    refusals: tuple[type[BaseException], ...] = ()
    prepare: Callable[[bytes], Any] = bytes
    mutate: Callable[[bytes, int, int], bytes] | None = None
    opens: tuple[str, ...] = ()
    events: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finding:
    """What a reader did that it must not do.

    Attributes:
        reader: Its name.
        what: The exception and its place, or how the process ended.
        data: The shortest bytes known to cause it.
        details: The traceback, if there is one.
        after: The seed, and how many inputs had been read by then.
        kept_at: The file with the bytes.
    """

    reader: str
    what: str
    data: bytes
    details: str
    after: str
    kept_at: Path


@dataclass
class Fuzzed:
    """What came of fuzzing one reader: inputs read, places in the code reached, findings."""

    reader: str
    executions: int = 0
    edges: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    not_repeated: list[str] = field(default_factory=list)


def fuzz(reader: Reader, folder: Path, *, seconds: float, seed: int) -> Fuzzed:
    """Fuzz one reader for so many seconds.

    Args:
        reader: The reader.
        folder: Where the corpus, the logs and the findings go; a corpus that is there is continued.
        seconds: How long, without the time to repeat and shorten findings.
        seed: Of the mutations.
    """
    _warm_up(reader)
    place = folder.absolute() / re.sub(r"[^a-z0-9]+", "-", reader.name.lower())
    corpus, raw = place / "corpus", place / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    for directory in (corpus, raw):
        directory.mkdir(parents=True, exist_ok=True)
    for data in reader.seeds:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    result, known = Fuzzed(reader.name), set[str]()
    while (left_s := seconds - result.seconds) > 0:
        began = time.monotonic()
        shared, log = mmap.mmap(-1, _SHARED_BYTES), place / "log.txt"
        lead = functools.partial(_lead, reader, corpus, raw, shared, left_s, seed + result.executions)
        ended = _in_child(lead, log, shared)
        number, length = _HEADER.unpack_from(shared)
        last = shared[_HEADER.size : _HEADER.size + length]
        result.seconds += time.monotonic() - began
        edges = re.findall(r"\bcov: (\d+)", log.read_text(errors="replace"))
        result.edges = max(result.edges, *map(int, edges)) if edges else result.edges
        suspects = [path.read_bytes() for path in sorted(raw.iterdir())]
        if ended is not None:
            suspects.append(last)
        for data in suspects:
            _judge(reader, data, result, known, place, f"seed {seed}, {result.executions + number} inputs")
        shutil.rmtree(raw)
        raw.mkdir()
        result.executions += number
        if ended is not None and not number:
            raise RuntimeError(f"the fuzzing of {reader.name} did not begin: {ended}\n{log.read_text()[-3000:]}")
    return result


def repeat(reader: Reader, data: bytes) -> tuple[str, str] | None:
    """Let a new process read these bytes; return what it did that it must not do, and the traceback, if anything."""
    _warm_up(reader)
    inner, outer = os.pipe()

    def read() -> None:
        found = _Watch(reader)(data)
        text = "\0".join(found) if found else ""
        os.write(outer, text.encode("ascii", "backslashreplace")[:60_000])

    ended = _in_child(read, Path(os.devnull), None)
    os.close(outer)
    with os.fdopen(inner, "rb") as pipe:
        text = pipe.read().decode()
    if ended is not None:
        return ended, ""
    what, _, details = text.partition("\0")
    return (what, details) if what else None


# -- in the parent ------------------------------------------------------------------------------------------

_warm: set[Reader] = set()


def _warm_up(reader: Reader) -> None:
    """Read the seeds once: what a first reading imports and remembers is not the bytes' doing."""
    if reader in _warm:
        return
    _warm.add(reader)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, contextlib.chdir(folder):
        for number, data in enumerate(reader.seeds):
            try:
                reader.read(reader.prepare(data))
            except reader.refusals as error:
                if not number:
                    raise RuntimeError(f"{reader.name}: the first seed is refused, so nothing is tested") from error


def _judge(reader: Reader, data: bytes, result: Fuzzed, known: set[str], place: Path, after: str) -> None:
    found = repeat(reader, data)
    if found is None:
        result.not_repeated.append(hashlib.sha1(data).hexdigest()[:12])
        return
    if found[0] in known:
        return
    known.add(found[0])
    data = _shortened(reader, data, found[0])
    details = (repeat(reader, data) or found)[1]
    kept = place / f"finding-{hashlib.sha1(found[0].encode()).hexdigest()[:12]}"
    kept.write_bytes(data)
    kept.with_suffix(".txt").write_text(
        f"{reader.name}: {found[0]}\n{after}; {len(data)} bytes: {data[:2000]!r}\n{details}"
    )
    result.findings.append(Finding(reader.name, found[0], data, details, after, kept))


def _shortened(reader: Reader, data: bytes, what: str) -> bytes:
    """Leave out parts of the bytes, halves first, as long as the same comes of them."""
    until = time.monotonic() + _SHORTEN_S
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data) and time.monotonic() < until:
            shorter = data[:at] + data[at + size :]
            found = repeat(reader, shorter)
            if found is not None and found[0] == what:
                data = shorter
            else:
                at += size
        size //= 2
    return data


def _in_child(work: Callable[[], None], log: Path, shared: mmap.mmap | None) -> str | None:
    """Do ``work`` in a child, in an empty directory; return how the child ended, if not by itself."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            return _wait(child, shared)
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
            faulthandler.disable()  # pytest's prints to the terminal
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(folder)
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - it goes to the log
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _wait(child: int, shared: mmap.mmap | None) -> str | None:
    """Wait for the end of a child. One that reads no other input within a minute is killed."""
    handle = os.pidfd_open(child)
    try:
        before = 0
        while not select.select([handle], [], [], _STALLED_S)[0]:
            now = _HEADER.unpack_from(shared)[0] if shared is not None else 0
            if now == before:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"it had no end after {_STALLED_S:.0f} s"
            before = now
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(handle)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        by = signal.Signals(os.WTERMSIG(status))
        return f"it took more than {CPU_S:g} s of CPU" if by == signal.SIGPROF else f"the process died: {by.name}"
    return f"the process ended with {os.WEXITSTATUS(status)}" if os.WEXITSTATUS(status) else None


# -- in the child -------------------------------------------------------------------------------------------


def _lead(reader: Reader, corpus: Path, raw: Path, shared: mmap.mmap, seconds: float, seed: int) -> None:
    """Read bytes that atheris makes, up to the end of the time. It does not return."""
    import atheris

    watch = _Watch(reader)
    seen = set[str]()
    number = 0
    until = time.monotonic() + seconds

    def read(data: bytes) -> None:
        nonlocal number
        if number > len(reader.seeds) and time.monotonic() > until:  # atheris knows whole seconds only
            os._exit(0)
        number += 1
        _HEADER.pack_into(shared, 0, number, len(data))
        shared[_HEADER.size : _HEADER.size + len(data)] = data
        found = watch(data)
        if found is not None and found[0] not in seen:
            seen.add(found[0])
            (raw / f"{len(seen):04}").write_bytes(data)

    longest = min(max([4096, *(4 * len(data) for data in reader.seeds)]), _LONGEST_BYTES)
    flags = {
        "max_len": longest,
        "seed": seed % (1 << 31) or 1,
        "artifact_prefix": f"{raw}/dead-",
        "len_control": 0,
        **dict.fromkeys(("rss_limit_mb", "malloc_limit_mb"), 0),
        "timeout": 1_000_000,  # a watch of wall time would be atheris's, which 0 does not turn off
        **dict.fromkeys((f"handle_{name}" for name in ("segv", "bus", "abrt", "ill", "fpe", "int", "term")), 0),
    }
    more = {} if reader.mutate is None else {"custom_mutator": _mixed(reader.mutate, atheris)}
    atheris.Setup([sys.argv[0], *(f"-{name}={value}" for name, value in flags.items()), str(corpus)], read, **more)
    atheris.Fuzz()


def _mixed(mutate: Callable[[bytes, int, int], bytes], atheris: Any) -> Callable[[bytes, int, int], bytes]:
    """Let every fourth change be one of atheris, which knows no structure."""

    def change(data: bytes, longest: int, seed: int) -> bytes:
        changed = mutate(data, longest, seed) if seed % 4 else b""
        return bytes(changed or atheris.Mutate(data, longest))[:longest]

    return change


class _ForbiddenError(BaseException):
    """An action that no reading needs; raised where it would happen."""


class _Watch:
    """Reads one input after another under the limits, and says what each did that it must not do."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._allowed = _ALLOWED_EVENTS | reader.events
        self._folder = Path(os.path.realpath(os.curdir))
        self._reading = False
        self._forbidden: tuple[str, str] | None = None
        self._used_bytes, self._readings = 0, 0
        sys.addaudithook(self._hear)

    def __call__(self, data: bytes) -> tuple[str, str] | None:
        reader = self._reader
        given = reader.prepare(data)
        before = _listing(self._folder)
        self._forbidden = None
        caught: BaseException | None = None
        with self._limited():
            self._reading = True
            try:
                reader.read(given)
            except BaseException as error:  # noqa: BLE001 - judged below
                caught = error
            finally:
                self._reading = False
        if self._forbidden is not None:
            return self._forbidden
        if caught is not None and not isinstance(caught, reader.refusals):
            return _place_of(caught), "".join(traceback.format_exception(caught, limit=-12))
        if (after := _listing(self._folder)) != before:
            return f"it changed the files {sorted({name for name, *_ in before ^ after})[:3]}", ""
        return None

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        if self._readings % 64 == 0:
            with open("/proc/self/statm") as facts:
                self._used_bytes = int(facts.read().split()[5]) * resource.getpagesize()
        self._readings += 1
        resource.setrlimit(resource.RLIMIT_DATA, (self._used_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # ends the process: nobody hears SIGPROF
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._reading:
            return
        if event not in self._allowed:
            about = [one for one in arguments[:1] if isinstance(one, str | bytes)]
            why = " ".join(["it did", event, *map(ascii, about)])[:120]
        elif event == "open" and not self._may_open(*arguments):
            why = f"it opened {str(arguments[0])[:80]!a} with {arguments[1]!r}"
        else:
            return
        self._reading = False
        self._forbidden = self._forbidden or (why, "".join(traceback.format_stack(limit=12)))
        self._reading = True
        raise _ForbiddenError(why)

    def _may_open(self, path: Any, mode: str | None, flags: int) -> bool:
        if flags & _WRITES or (mode is not None and set(mode) & set("wax+")):
            return False
        if isinstance(path, int):
            return True
        whole = os.path.normpath(os.path.join(self._folder, os.fsdecode(path)))
        return whole.startswith((f"{self._folder}/", *self._reader.opens))


def _listing(folder: Path) -> set[tuple[str, int, int]]:
    """What is in a folder of the reader's and one below: names, sizes and times of change."""
    found = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                found |= {(f"{entry.name}/{name}", size, at) for name, size, at in _listing(Path(entry.path))}
                continue
            found.add((entry.name, status.st_size, status.st_mtime_ns))
    return found


def _place_of(error: BaseException) -> str:
    """The class of an exception and the line that raised it, in the package if it came through it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if "/ckptmirror/" in frame.f_code.co_filename]
    if not frames:
        return type(error).__name__
    frame, line = (own or frames)[-1]
    code = frame.f_code
    return f"{type(error).__name__} in {code.co_name}, {'/'.join(Path(code.co_filename).parts[-2:])}:{line}"
