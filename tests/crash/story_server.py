"""A process that has torch imported and forks one child per story: ``python -m tests.crash.story_server``.

Reads one JSON request a line: ``{"story", "place", "crash_at", "count"}``; answers one JSON line: ``{"status"}``, the
child's wait status. With ``count`` the child leaves the points that it passed in ``<place>/points.json``. What a child
says goes to ``<place>/said.log``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from ckptmirror.local import crashpoints
from tests.crash import scenarios

CHILD_LIMIT_S = 90


def run_child(request: dict[str, Any]) -> int:
    """Fork, tell the story, return the wait status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            tell(request)
            status = 0
        except BaseException:  # noqa: BLE001 - said in the log, and by the status
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def tell(request: dict[str, Any]) -> None:
    """Tell one story in this process."""
    place = Path(request["place"])
    log = os.open(place / "said.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"--- {request['story']} (killed at {request['crash_at']})", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(CHILD_LIMIT_S - 5)
    signal.alarm(CHILD_LIMIT_S)
    scenarios.STORIES[request["story"]](place, lambda: crashpoints.arm(request["crash_at"]))
    if request["count"]:
        (place / "points.json").write_text(json.dumps(crashpoints.passed()))


def warm_up() -> None:
    """Tell a whole story here once, so that no child has to import anything."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        scenarios.STORIES["prepare_one_mirrored"](place, crashpoints.disarm)
        scenarios.STORIES["go_on"](place, crashpoints.disarm)
    crashpoints.disarm()


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    warm_up()
    assert threading.active_count() == 1, [thread.name for thread in threading.enumerate()]
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps({"status": run_child(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
