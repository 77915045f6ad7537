"""A run's history made by hand: clocks that are moved, entries of the journal, transitions as the table keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptmirror.core import events
from ckptmirror.core.journal import JournalEntry, utc_text
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Kind, Meta
from ckptmirror.local.uploads import Transition
from ckptmirror.observe.history import History
from tests.kit.saves import save_id_of

START_S = 1_790_000_000.0
MIRROR = "gs://bucket/run-17"
KINDS: tuple[Kind, ...] = ("dcp",)


@dataclass
class WrittenRun:
    """Writes a history; the wall clock may be set, the boot clock only goes on."""

    now_s: float = 0.0
    wall_off_s: float = START_S
    boot: str = "boot-1"
    boot_off_s: float = 1000.0
    entries: list[JournalEntry] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    saves: list[Meta] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def wait(self, duration_s: float) -> WrittenRun:
        self.now_s += duration_s
        return self

    @property
    def wall_s(self) -> float:
        return self.now_s + self.wall_off_s

    def tell(self, event: events.Event, writer: str = "w0", by: str = "trainer") -> None:
        self._numbers[writer] = self._numbers.get(writer, 0) + 1
        boot_s = self.now_s + self.boot_off_s
        self.entries.append(JournalEntry(event, self.wall_s, self.boot, boot_s, by, writer, self._numbers[writer], 1))

    def decide(self, attempt: int, step: int | None = None, writer: str = "w0") -> None:
        place = "" if step is None else "disk"
        self.wait(0.5).tell(events.AttemptDecided(attempt=attempt, step=step, place=place, duration_s=0.5), writer)

    def save(self, step: int, save_id: str, *, ranks: int = 1, attempt: str = "w", copy_s: float = 0.1) -> None:
        """One save of all ranks: host copy, then a second of writing; each rank is a writer of its own."""
        self.wait(copy_s)
        for rank in range(ranks):
            copied = events.HostCopied(step=step, kinds=KINDS, rank=rank, duration_s=copy_s)
            self.tell(copied, f"{attempt}{rank}")
        self.wait(1.0)
        for rank in range(ranks):
            done = events.SaveCommitted(step=step, kinds=KINDS, rank=rank, save_id=save_id, duration_s=1.0)
            self.tell(done, f"{attempt}{rank}")

    def move(
        self,
        save_id: str,
        step: int,
        old: RecordState | None,
        new: RecordState | None,
        *,
        path: str = "",
        mirror: str = MIRROR,
        reason: str = "",
    ) -> None:
        """One transition of one file, now."""
        self.transitions.append(
            Transition(
                id=len(self.transitions) + 1,
                save_id=save_id,
                step=step,
                path=path or f"model_{step:06}.pt",
                mirror=mirror,
                old=old,
                new=new,
                token=1,
                worker=None,
                reason=reason,
                at_utc=utc_text(self.wall_s),
            )
        )

    def upload(self, save_id: str, step: int, took_s: float = 2.0, *, mirror: str = MIRROR) -> None:
        """A save's one file and its meta go to a mirror."""
        state, meta = RecordState, f"meta_{step:06}.json"
        for path in ("", meta):
            self.move(save_id, step, None, state.PENDING, path=path, mirror=mirror)
        for path in ("", meta):
            self.move(save_id, step, state.PENDING, state.UPLOADING, path=path, mirror=mirror)
            self.wait(took_s / 2)
            self.move(save_id, step, state.UPLOADING, state.VERIFIED, path=path, mirror=mirror)

    def history(self) -> History:
        return History(tuple(self.entries), tuple(self.transitions), tuple(self.saves))


def long_run(saves: int, *, ranks: int = 2) -> WrittenRun:
    """Two attempts with a night between them; one upload that failed, one rotation per save, one that was refused."""
    run = WrittenRun()
    run.decide(1)
    for number in range(1, saves + 1):
        step, save_id = number * 100, save_id_of(number)
        if number == saves // 2 + 1:
            run.tell(events.StopRequested(reason="SIGTERM"))
            run.tell(events.AttemptEnded(attempt=1, status="stopped"))
            run.wait(9 * 3600.0)
            run.decide(2, step - 100, writer="v0")
        run.wait(60.0).save(step, save_id, ranks=ranks, attempt="v" if number > saves // 2 else "w")
        if number == 2:
            run.move(save_id, step, None, RecordState.PENDING)
            run.move(save_id, step, RecordState.PENDING, RecordState.UPLOADING)
            run.wait(1.0).move(
                save_id, step, RecordState.UPLOADING, RecordState.FAILED, reason="403 <forbidden> & more"
            )
            run.tell(events.RotationRefused(step=step, save_id=save_id, reason="failed"))
            continue
        run.upload(save_id, step)
        run.tell(events.SaveRotated(step=step, save_id=save_id, reason="not wanted", duration_s=0.2))
    return run
