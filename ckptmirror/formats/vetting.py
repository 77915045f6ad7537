"""Trying a large pickle in a child with limits before it is unpickled here.

Reading a pickle opcode by opcode (``pickle_scan``) takes some microseconds for each: nothing for a small one, minutes
for the ``.metadata`` of a job of a thousand ranks. A child that unpickles it, with as much memory and processor time
as honest ones need many times over, takes as long as the unpickling itself, and says the same.

Rules:
* The child has the same allow-list, and nothing that it makes comes back: only whether it got to the end.
* The limits follow the size of the pickle: what unfolds, hashes or nests without end meets one of them.
* Where no child can be had, the opcodes are read after all.
* A save does without: it starts no process for what it has just written.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from ckptmirror.core.errors import IntegrityError, Temporary, UnsafePickle
from ckptmirror.formats.allow_list import AllowListUnpickler
from ckptmirror.formats.pickle_scan import PickleRules, scan_pickle

__all__ = ["VET_FROM_BYTES", "vet"]

VET_FROM_BYTES = 1 << 20  # from here on the child, which has torch to import, is the faster one
_FREE_BYTES, _BYTES_PER_BYTE = 256 << 20, 100  # honest ones take 10 to 20
_FREE_S, _BYTES_PER_S = 10, 500_000  # of processor time; honest ones: 5 MB/s and more
_WALL_FACTOR = 20  # of the processor time: a machine with that much else to do
_REFUSED, _TOO_MUCH = 41, 42
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ckptmirror.formats.vetting import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


def vet(data: bytes) -> None:
    """Return if unpickling ``data``, with the allow-list of ``.metadata``, is bounded by its size.

    Raises:
        UnsafePickle: It asks for what is not allowed, or takes more than its size explains.
        IntegrityError: It is broken.
        Temporary: The machine is too busy to say.
    """
    if len(data) < VET_FROM_BYTES or not sys.executable:
        scan_pickle(data, PickleRules())
        return
    limit_s = _seconds_for(len(data))
    places = json.dumps([place for place in sys.path if isinstance(place, str)])
    command = [sys.executable, "-I", "-c", _CHILD, places, str(len(data)), str(limit_s)]
    try:
        child = subprocess.run(  # in a session of its own: a signal to the training is none to it
            command,
            input=data,
            capture_output=True,
            timeout=limit_s * _WALL_FACTOR,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise Temporary(f"It was not read within {limit_s * _WALL_FACTOR} s: the machine is too busy.") from error
    except OSError:  # no memory, no process: as without a child
        scan_pickle(data, PickleRules())
        return
    if child.returncode == 0:
        return
    if child.returncode == _REFUSED:
        is_unsafe, message = json.loads(child.stdout.splitlines()[-1])  # what starts with every Python may print too
        raise (UnsafePickle if is_unsafe else IntegrityError)(message)
    if child.returncode in (_TOO_MUCH, -signal.SIGXCPU, -signal.SIGSEGV):
        raise UnsafePickle(f"Its {len(data)} bytes take more memory or time than {len(data)} honest ones can.")
    scan_pickle(data, PickleRules())  # the child could not begin, or somebody ended it: that says nothing of the data


def _seconds_for(size_bytes: int) -> int:
    return _FREE_S + size_bytes // _BYTES_PER_S


def main(size_bytes: int, limit_s: int) -> NoReturn:
    """Be the child: unpickle what comes on standard input, within limits of memory and of processor time."""
    data = sys.stdin.buffer.read(size_bytes)
    end_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + limit_s
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, end_s + 5))  # SIGXCPU first, and SIGKILL in the end
    limit_bytes = _data_bytes() + _FREE_BYTES + _BYTES_PER_BYTE * size_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        AllowListUnpickler(io.BytesIO(data)).load()
    except (MemoryError, RecursionError):
        sys.exit(_TOO_MUCH)
    except Exception as error:  # noqa: BLE001 - hostile pickles fail in any way
        text = error.message if isinstance(error, UnsafePickle) else f"It is broken: {type(error).__name__}: {error}"
        sys.stdout.write("\n" + json.dumps([isinstance(error, UnsafePickle), text[:300]]))
        sys.stdout.flush()
        os._exit(_REFUSED)  # nothing is printed after it
    os._exit(0)  # without taking apart what was made: it may be deeper than a recursion goes


def _data_bytes() -> int:
    """Bytes of private writable memory that this process has already: what RLIMIT_DATA counts."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024
