"""What the demo tells.

Every sentence that it prints is asserted by the line above it; a false one ends the demo with exit code 1.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path

from ckptmirror.cli._demo_place import DemoPlace
from ckptmirror.cli._demo_processes import BUCKET, EVERY, FalseSentence, Processes
from ckptmirror.cli._human_text import size
from ckptmirror.flow.places.resolve import find_local_checkpoint_steps, list_checkpoints
from ckptmirror.flow.status import read_status
from ckptmirror.testing import Fault, GcsServerProcess

__all__ = ["FIRST_DISK", "Story"]

STEPS = 60
ALL_STEPS = list(range(EVERY, STEPS + 1, EVERY))
LIMIT_S = 120.0
MIRROR_LIMIT_S = 900.0  # to a real bucket, over whatever line there is
FIRST_DISK = "first-disk.svg"


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
        self.nodes = [folder / "node-0", folder / "node-1"]
        self.nodes_mirror = f"{self.place}/nodes"
        self.processes = Processes(folder, LIMIT_S if place is None else MIRROR_LIMIT_S)
        self.started = time.monotonic()

    def tell(self) -> None:
        """Tell it all."""
        losses = self.undisturbed()
        self.killed_while_saving()
        self.resumed(losses)
        self.rotated()
        self.disk_lost()
        last = self.preempted()
        self.evaluated(last)
        self.node_lost(last)
        self.say(f"Done, after {time.monotonic() - self.started:.0f} s.")

    # -- the chapters ---------------------------------------------------------------------------------------

    def undisturbed(self) -> dict[int, str]:
        """Two nodes save together; return the losses, which all others are compared with."""
        self.say("Two nodes train a small model on the source code of Python's standard library, undisturbed.")
        self.say("Each has one rank, and a directory in place of a local disk.")
        codes = self.processes.train_on_nodes("nodes", self.nodes, self.nodes_mirror, steps=STEPS)
        losses = self.processes.losses("nodes")
        self.check(codes == [0, 0] and len(losses) == STEPS, f"the run ends after {len(losses)} steps")
        shards = [{file.name for file in node.glob(f"dcp_{STEPS:06d}/*.distcp")} for node in self.nodes]
        self.check(
            shards == [{"__0_0.distcp", "__0_small0.distcp"}, {"__1_0.distcp"}],
            f"of step {STEPS}, each node's disk has only what its own rank wrote: __0_*.distcp, and __1_0.distcp",
        )
        whole = [line.step for line in list_checkpoints(self.nodes_mirror) if line.standing == "current"]
        self.check(sorted(set(whole)) == ALL_STEPS, f"the mirror has every step, whole: {ALL_STEPS}")
        return losses

    def killed_while_saving(self) -> None:
        """Rank 0 dies by SIGKILL between the files of a save and its meta."""
        self.say("Two ranks on one node train the same, but kill -9 hits them while they save step 30.")
        code = self.processes.train("killed", self.root, self.mirror, steps=STEPS, crash_at="save.publish:before@18")
        steps = find_local_checkpoint_steps(self.root)
        self.check(code != 0, "the run died")
        self.check(30 not in steps and 20 in steps, f"on disk, the steps {steps} are whole, and there is no step 30")

    def resumed(self, losses: dict[int, str]) -> None:
        """The same command resumes; its losses are those of the undisturbed run."""
        self.say("The same command runs again.")
        if self.server is not None:
            self.server.faults([Fault("upload.*", object="run/model_000040", times=0, status=400)])
        code = self.processes.train("resumed", self.root, self.mirror, steps=STEPS)
        start = self.processes.note("resumed", "start")
        again = self.processes.losses("resumed")
        if self.server is None:
            self.check(code == 0, "the exit code says that everything is mirrored")
        else:
            told = "the exit code says that something is not mirrored (the mirror refuses one file, see below)"
            self.check(code != 0, told)
        self.check(start["step"] == 20, f"it continued from step {start['step']} ({start['kind']}, {start['place']})")
        same = all(losses[step] == loss for step, loss in again.items())
        self.check(
            same and max(again) == STEPS,
            f"all {len(again)} losses up to step {STEPS} equal those of the undisturbed run on two nodes, bit for bit",
        )

    def rotated(self) -> None:
        """Rotation kept the newest two, and the one whose upload failed."""
        self.say("Rotation is set to keep the last two steps.")
        if self.server is not None:
            self.kept_for_its_failed_upload(self.server)
        self.processes.cli("rotate", "--root", str(self.root), "--keep-last", "2")
        steps = find_local_checkpoint_steps(self.root)
        now = "and now rotation deletes step 40" if self.server is not None else "the last two steps are on disk"
        self.check(steps == [50, 60], f"{now}: {steps}")
        on_mirror = sorted({line.step for line in list_checkpoints(self.mirror) if line.standing == "current"})
        self.check(on_mirror == ALL_STEPS, f"the mirror has every step: {on_mirror}")

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
        drained = self.processes.cli("drain", "--root", str(self.root))
        self.check(
            drained.returncode == 0,
            "once the mirror is repaired, `ckptmirror drain` finishes: " + drained.stdout.strip(),
        )

    def disk_lost(self) -> None:
        """The machine is gone; the next one starts from the mirror, and is preempted."""
        drawn = self.processes.cli("timeline", "--root", str(self.root), "--out", str(self.folder / FIRST_DISK))
        self.check(
            drawn.returncode == 0, f"`ckptmirror timeline` draws everything so far ({FIRST_DISK}; --timeline keeps it)"
        )
        self.say("The machine is lost, with its disk. The same command starts on a new machine and trains further.")
        shutil.rmtree(self.root)
        code = self.processes.train("warm", self.root, self.mirror, steps=100 * STEPS, sigterm_at=STEPS + 5)
        start = self.processes.note("warm", "start")
        self.check(
            start["step"] == STEPS and start["place"] == self.mirror,
            f"it continued from step {start['step']} of {start['place']}",
        )
        self.check(code == 0, "SIGTERM reaches only rank 0, but both ranks stop, with exit code 0")

    def preempted(self) -> int:
        """SIGTERM left an emergency snapshot, from which the next start continues; return the last step."""
        stopped = self.processes.note("warm", "stopped")
        emergencies = sorted(path.name for path in self.root.glob("emergency_step_*"))
        self.check(
            len(emergencies) == 1 and f"{stopped['step']:06d}" in emergencies[0],
            f"they stopped at the same step, {stopped['step']}, and left the snapshot {emergencies[0]}",
        )
        last = int(stopped["step"]) + EVERY
        self.say("The same command runs once more, to the end.")
        code = self.processes.train("last", self.root, self.mirror, steps=last)
        start = self.processes.note("last", "start")
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
            staged = self.processes.cli(
                "stage", "--step", str(last), "--kind", kind, "--mirror", self.mirror, "--dest", str(dest)
            )
            self.check(staged.returncode == 0, f"stage --kind {kind}: {Path(staged.stdout.strip()).name}")
            paths.append(staged.stdout.strip())
        evaluated = self.processes.python("eval", "-m", "ckptmirror.integrations.plain_eval", *paths)
        lines = [json.loads(line) for line in evaluated.stdout.splitlines()]
        trained = self.processes.note("last", "finished")["eval_loss"]
        self.check(
            len(lines) == 2 and {line["eval_loss"] for line in lines} == {trained},
            f"both give the loss {float.fromhex(trained):.4f}, the same as in the trainer",
        )
        total = sum(path.stat().st_size for path in (self.folder / "eval").rglob("*") if path.is_file())
        self.say(f"  ({size(total)} staged and verified)")

    def node_lost(self, last: int) -> None:
        """Of the two nodes, one loses its disk, and both continue."""
        self.say(
            "Back to the two nodes: node 1 is lost, with its disk. The same command trains further, with a new node 1."
        )
        shutil.rmtree(self.nodes[1])
        if self.server is not None:
            self.server.clear_log()
        codes = self.processes.train_on_nodes("nodes-again", self.nodes, self.nodes_mirror, steps=last)
        start = self.processes.note("nodes-again", "start")
        self.check(
            codes == [0, 0] and start["step"] == STEPS and start["place"] == self.nodes_mirror,
            f"both continued from step {start['step']}; what a node lacked came from {start['place']}",
        )
        if self.server is not None:
            self.sent_once(self.server, f"nodes/dcp_{STEPS:06d}/__0_0.distcp")
        again = self.processes.losses("nodes-again")
        self.check(
            again == self.processes.losses("warm") | self.processes.losses("last"),
            f"all {len(again)} losses up to step {last} equal those of the two ranks on one node, bit for bit",
        )

    def sent_once(self, server: GcsServerProcess, name: str) -> None:
        """Node 0 did not fetch what it still has."""
        sent = Counter(entry["object"] for entry in server.log("object.media"))
        self.check(
            sent[name] == 1,
            f"the mirror sent {Path(name).name} once, to the new node: node 0 read its own from its disk",
        )

    # -- how they are told ----------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        print(sentence, flush=True)

    def check(self, true: bool, sentence: str) -> None:
        """Print a sentence that is true, or end the demo."""
        if not true:
            raise FalseSentence(f"This is not so: {sentence}")
        print(f"  - {sentence}", flush=True)
