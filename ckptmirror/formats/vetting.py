"""Tries a large pickle in a child process with limits before it is unpickled here.

Reading a pickle opcode by opcode (``pickle_scan``) takes some microseconds per opcode: nothing for a small pickle,
minutes for the ``.metadata`` of a job with a thousand ranks. A child process that unpickles it takes only as long as
the unpickling, and gives the same answer. Its limits are many times what honest pickles need.

Rules:
* The child has the same allow-list, and returns nothing but whether it finished.
* The limits grow with the size of the pickle: whatever unfolds, hashes or nests without end exceeds one of them.
* If no child can be started, the opcodes are read instead.
* A save never starts a child for what it has just written.
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
from ckptmirror.formats.metadata_allow_list import AllowListUnpickler
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
        UnsafePickle: It asks for what is not allowed, or needs more than its size explains.
        IntegrityError: It is broken.
        Temporary: The machine is too busy to tell.
    """
    if len(data) < VET_FROM_BYTES or not sys.executable:
        scan_pickle(data, PickleRules())
        return
    limit_s = _seconds_for(len(data))
    places = json.dumps([place for place in sys.path if isinstance(place, str)])
    command = [sys.executable, "-I", "-c", _CHILD, places, str(len(data)), str(limit_s)]
    try:
        child = subprocess.run(  # in its own session: signals to the training do not reach it
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
    scan_pickle(data, PickleRules())  # the child could not start or was killed, which says nothing about the data


def _seconds_for(size_bytes: int) -> int:
    return _FREE_S + size_bytes // _BYTES_PER_S


def main(size_bytes: int, limit_s: int) -> NoReturn:
    """Run as the child: unpickle standard input within limits of memory and CPU time."""
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
    os._exit(0)  # without freeing the objects, which may be nested too deeply


def _data_bytes() -> int:
    """Bytes of private writable memory that this process has already: what RLIMIT_DATA counts."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024
