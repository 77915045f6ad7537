"""What the demo tells, and does.

Every sentence that it prints is asserted by the line above it; a false one ends the demo with exit code 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptmirror.cli._demo_place import DemoPlace
from ckptmirror.cli._human_text import size
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.flow.places.resolve import find_local_checkpoint_steps, list_checkpoints
from ckptmirror.flow.status import read_status
from ckptmirror.testing import Fault, GcsServerProcess

__all__ = ["FIRST_DISK", "Story", "server_beside"]

STEPS = 60
EVERY = 10
BUCKET = "demo"
LIMIT_S = 120.0
LEAVE_S = 40.0  # torchrun gives its workers 30
MIRROR_LIMIT_S = 900.0  # to a real bucket, over whatever line there is
FIRST_DISK = "first-disk.svg"


class FalseSentence(CkptMirrorError):
    """The demo would have told something that is not so."""

    hint = "The files of this demo are kept; the log of every process is beside them."


@contextlib.contextmanager
def server_beside(folder: Path) -> Iterator[GcsServerProcess]:
    """Run the strict server; whatever is started meanwhile talks to it and to nothing else."""
    with GcsServerProcess(folder / "gcs", buckets=[BUCKET]) as server:
        os.environ.update(server.environment)
        for variable in ("NO_PROXY", "no_proxy"):
            os.environ[variable] = ",".join(filter(None, [os.environ.get(variable), "127.0.0.1"]))
        yield server


class Story:
    """One run of the demo in one folder.

    Args:
        folder: Holds its roots and logs.
        server: The strict server; None with a mirror of the user's, which refuses nothing on demand.
        place: Where on the user's mirror it works.
    """

    def __init__(self, folder: Path, server: GcsServerProcess | None, place: DemoPlace | None = None) -> None:
        self.folder = folder
        self.server = server
        self.root = folder / "local-ssd"
        self.place = place.url if place is not None else f"gs://{BUCKET}"
        self.mirror = f"{self.place}/run"
        self.limit_s = LIMIT_S if place is None else MIRROR_LIMIT_S
        self.started = time.monotonic()

    def tell(self) -> None:
        """Tell it all."""
        self.say("Two ranks train a small model on the source code of Python's standard library, undisturbed.")
        reference = self.train("reference", root=self.folder / "undisturbed", mirror=f"{self.place}/undisturbed")
        losses = self.losses("reference")
        self.check(reference == 0 and len(losses) == STEPS, f"the run ends after {len(losses)} steps")

        self.killed_while_saving()
        self.resumed(losses)
        self.rotated()
        self.disk_lost()
        self.evaluated(self.preempted())
        self.say(f"Done, after {time.monotonic() - self.started:.0f} s.")

    # -- the chapters ---------------------------------------------------------------------------------------

    def killed_while_saving(self) -> None:
        """Rank 0 dies by SIGKILL between the files of a save and its meta."""
        self.say("The same run starts again, but kill -9 hits it while it saves step 30.")
        code = self.train("killed", crash_at="save.publish:before@18")
        steps = find_local_checkpoint_steps(self.root)
        self.check(code != 0, "the run died")
        self.check(30 not in steps and 20 in steps, f"on disk, the steps {steps} are whole, and there is no step 30")

    def resumed(self, losses: dict[int, str]) -> None:
        """The same command resumes; its losses are those of the undisturbed run."""
        self.say("The same command runs again.")
        if self.server is not None:
            self.server.faults([Fault("upload.*", object="run/model_000040", times=0, status=400)])
        code = self.train("resumed")
        start = self.note("resumed", "start")
        again = self.losses("resumed")
        if self.server is None:
            self.check(code == 0, "the exit code says that everything is mirrored")
        else:
            told = "the exit code says that something is not mirrored (the mirror refuses one file, see below)"
            self.check(code != 0, told)
        self.check(start["step"] == 20, f"it continued from step {start['step']} ({start['kind']}, {start['place']})")
        same = all(losses[step] == loss for step, loss in again.items())
        self.check(
            same and max(again) == STEPS,
            f"all {len(again)} losses up to step {STEPS} equal those of the undisturbed run, bit for bit",
        )

    def rotated(self) -> None:
        """Rotation kept the newest two, and the one whose upload failed."""
        self.say("Rotation is set to keep the last two steps.")
        if self.server is not None:
            self.kept_for_its_failed_upload(self.server)
        self.cli("rotate", "--root", str(self.root), "--keep-last", "2")
        steps = find_local_checkpoint_steps(self.root)
        now = "and now rotation deletes step 40" if self.server is not None else "the last two steps are on disk"
        self.check(steps == [50, 60], f"{now}: {steps}")
        on_mirror = sorted({line.step for line in list_checkpoints(self.mirror) if line.standing == "current"})
        self.check(on_mirror == [10, 20, 30, 40, 50, 60], f"the mirror has every step: {on_mirror}")

    def kept_for_its_failed_upload(self, server: GcsServerProcess) -> None:
        """Step 40 stays until the mirror has it."""
        steps = find_local_checkpoint_steps(self.root)
        status = read_status(self.root)
        why = next(iter(next(line for line in status.saves if line.step == 40).waiting.values()))
        self.check(
            steps == [40, 50, 60],
            f"the steps {steps} are on disk: the last two, and step 40, which is not safe ({why})",
        )
        server.clear_faults()
        drained = self.cli("drain", "--root", str(self.root))
        self.check(
            drained.returncode == 0,
            "once the mirror is repaired, `ckptmirror drain` finishes: " + drained.stdout.strip(),
        )

    def disk_lost(self) -> None:
        """The machine is gone; the next one starts from the mirror, and is preempted."""
        drawn = self.cli("timeline", "--root", str(self.root), "--out", str(self.folder / FIRST_DISK))
        self.check(
            drawn.returncode == 0, f"`ckptmirror timeline` draws everything so far ({FIRST_DISK}; --timeline keeps it)"
        )
        self.say("The machine is lost, with its disk. The same command starts on a new machine and trains further.")
        shutil.rmtree(self.root)
        code = self.train("warm", steps=100 * STEPS, sigterm_at=STEPS + 5)
        start = self.note("warm", "start")
        self.check(
            start["step"] == STEPS and start["place"] == self.mirror,
            f"it continued from step {start['step']} of {start['place']}",
        )
        self.check(code == 0, "SIGTERM reaches only rank 0, but both ranks stop, with exit code 0")

    def preempted(self) -> int:
        """SIGTERM left an emergency snapshot, from which the next start continues; return the last step."""
        stopped = self.note("warm", "stopped")
        emergencies = sorted(path.name for path in self.root.glob("emergency_step_*"))
        self.check(
            len(emergencies) == 1 and f"{stopped['step']:06d}" in emergencies[0],
            f"they stopped at the same step, {stopped['step']}, and left the snapshot {emergencies[0]}",
        )
        last = int(stopped["step"]) + EVERY
        self.say("The same command runs once more, to the end.")
        code = self.train("last", steps=last)
        start = self.note("last", "start")
        self.check(
            code == 0 and start["step"] == stopped["step"] and start["kind"] == "emergency",
            f"it continued from the emergency snapshot of step {start['step']} and ended at step {last}",
        )
        return last

    def evaluated(self, last: int) -> None:
        """An eval host stages both kinds, and both evaluate to the same loss."""
        self.say("An eval host that has only the mirror's URL stages the last step, in both kinds.")
        paths = []
        for kind in ("dcp", "model"):
            dest = self.folder / "eval" / kind
            dest.mkdir(parents=True)
            staged = self.cli(
                "stage", "--step", str(last), "--kind", kind, "--mirror", self.mirror, "--dest", str(dest)
            )
            self.check(staged.returncode == 0, f"stage --kind {kind}: {Path(staged.stdout.strip()).name}")
            paths.append(staged.stdout.strip())
        evaluated = self.python("eval", "-m", "ckptmirror.integrations.plain_eval", *paths)
        lines = [json.loads(line) for line in evaluated.stdout.splitlines()]
        trained = self.note("last", "finished")["eval_loss"]
        self.check(
            len(lines) == 2 and {line["eval_loss"] for line in lines} == {trained},
            f"both give the loss {float.fromhex(trained):.4f}, the same as in the trainer",
        )
        total = sum(path.stat().st_size for path in (self.folder / "eval").rglob("*") if path.is_file())
        self.say(f"  ({size(total)} staged and verified)")

    # -- how they are told ----------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        print(sentence, flush=True)

    def check(self, true: bool, sentence: str) -> None:
        """Print a sentence that is true, or end the demo."""
        if not true:
            raise FalseSentence(f"This is not so: {sentence}")
        print(f"  - {sentence}", flush=True)

    def train(
        self,
        name: str,
        *,
        root: Path | None = None,
        mirror: str | None = None,
        steps: int = STEPS,
        crash_at: str = "",
        sigterm_at: int | None = None,
    ) -> int:
        """Run the trainer under torchrun to its end and return the exit code.

        Args:
            crash_at: The crash point at which a rank kills itself with SIGKILL.
            sigterm_at: Send SIGTERM to rank 0 once it has done this step.
        """
        arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        arguments += ["-m", "ckptmirror.integrations.plain_loop", "--root", str(root or self.root)]
        arguments += ["--mirror", mirror or self.mirror, "--steps", str(steps), "--save-every", str(EVERY)]
        arguments += ["--keep-last", "2", "--notes", str(self.folder / f"{name}.jsonl")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CKPTMIRROR_CRASH_AT": crash_at}
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            if sigterm_at is not None:
                self.wait_for_step(name, sigterm_at, process)
                os.kill(self.note(name, "start")["pid"], signal.SIGTERM)
            return process.wait(timeout=self.limit_s)
        finally:
            _end(process)

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until the trainer has noted a step."""
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline and process.poll() is None:
            if (self.folder / f"{name}.jsonl").exists() and max(self.losses(name), default=0) >= step:
                return
            time.sleep(0.02)
        raise FalseSentence(f"The trainer {name} never came to step {step}; see {name}.log.")

    def python(self, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python to its end; its stderr goes to a log in the demo's folder."""
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.run(
                [sys.executable, *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a ``ckptmirror`` verb."""
        return self.python(f"cli-{arguments[0]}", "-m", "ckptmirror", *arguments)

    def notes(self, name: str) -> list[dict[str, Any]]:
        """Read what a trainer noted."""
        text = (self.folder / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def note(self, name: str, event: str) -> dict[str, Any]:
        """Return the trainer's last note of one event."""
        found = [note for note in self.notes(name) if note["event"] == event]
        if not found:
            raise FalseSentence(f"The trainer {name} never came to {event!r}; see {name}.log.")
        return found[-1]

    def losses(self, name: str) -> dict[int, str]:
        """Return the losses of a trainer by step."""
        return {note["step"]: note["loss"] for note in self.notes(name) if note["event"] == "step"}


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End torchrun so that it ends its workers, which would go on without it: they have sessions of their own."""
    launcher.terminate()
    try:
        launcher.wait(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
