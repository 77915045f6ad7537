"""A process that has torch imported and forks one child per story and rank: ``python -m tests.crash.story_server``.

Reads one JSON request a line: ``{"story", "place", "crash_at", "count", "bug", "ranks", "killed_rank"}``; answers one
JSON line: ``{"statuses"}``, each rank's wait status. With ``count`` each child leaves the points that it passed in
``<place>/points<rank>.json``. What the children say goes to ``<place>/said.log``.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptmirror.local import crashpoints
from tests.crash import scenarios, seeded_bugs

CHILD_LIMIT_S = 90


def run_children(request: dict[str, Any]) -> list[int]:
    """Fork one child per rank, let each tell the story, return the wait statuses."""
    ranks = request.get("ranks", 1)
    request["rendezvous"] = tempfile.mktemp(prefix="rendezvous-", dir=request["place"])
    children = [fork_child(request, rank) for rank in range(ranks)]
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    Path(request["rendezvous"]).unlink(missing_ok=True)
    return statuses


def fork_child(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            tell(request, rank)
            status = 0
        except BaseException:  # noqa: BLE001 - said in the log, and by the status
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def tell(request: dict[str, Any], rank: int) -> None:
    """Tell one story in this process."""
    place = Path(request["place"])
    log = os.open(place / "said.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"--- {request['story']}, rank {rank} (killed at {request['crash_at']})", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(CHILD_LIMIT_S - 5)
    signal.alarm(CHILD_LIMIT_S)
    if request.get("bug") is not None:
        seeded_bugs.BUGS[request["bug"]]()
    crash_at = request["crash_at"] if rank == request.get("killed_rank", 0) else None
    ranks = request.get("ranks", 1)
    if ranks > 1:
        store = dist.FileStore(request["rendezvous"], ranks)
        limit = timedelta(seconds=scenarios.LIMIT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    scenarios.STORIES[request["story"]](place, lambda: crashpoints.arm(crash_at))
    if request["count"]:
        (place / f"points{rank}.json").write_text(json.dumps(crashpoints.passed()))
    if ranks > 1:
        dist.barrier()  # who leaves early would look like one that died


def warm_up() -> None:
    """Tell a whole story here once, so that no child has to import anything."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        scenarios.STORIES["prepare_one_mirrored"](place, crashpoints.disarm)
        scenarios.STORIES["go_on"](place, crashpoints.disarm)
    crashpoints.disarm()


def main() -> None:
    """Serve until the input ends; or, given a story and a place, tell that one story in this very process."""
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        # Marks come from the environment, from before the first import.
        scenarios.STORIES[sys.argv[1]](Path(sys.argv[2]), lambda: None)
        return
    warm_up()
    assert threading.active_count() == 1, [thread.name for thread in threading.enumerate()]
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that holds an object
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps({"statuses": run_children(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
