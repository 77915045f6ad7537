"""``ckptmirror status``: what is not yet safe, first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._human_text import age_text, behind_text, on_no_mirror, plain_reason, size
from ckptmirror.cli._next_command import with_places
from ckptmirror.cli._options import json_option, print_json, root_option
from ckptmirror.cli._progress import progress
from ckptmirror.cli._tables import SAVE_COLUMNS, Cell, Column, is_for_people, print_line, print_table, standing_style
from ckptmirror.cli._waiting_saves import waiting_facts, waiting_text
from ckptmirror.core.errors import CkptMirrorError, DeadlinePassed, IntegrityError, RefusedOnlyCopy
from ckptmirror.core.uncommitted import is_behind_text

if TYPE_CHECKING:
    from ckptmirror.flow.status import AwaitedSave, SaveLine, Status


_RUNNING = "running"
_NAMED = 8  # as many steps are named
_COLUMNS = (
    *SAVE_COLUMNS[:-1],
    Column("SAVE", 8, only_for_people=True),
    Column("AGE", only_for_people=True),
    Column("ON THE MIRRORS"),
)


@exit_codes(5, 6, 7, 8, 10, 11, 12)
@click.command(short_help="Show which saves are not yet on every required mirror.")
@root_option
@click.option(
    "--exit-code", "with_code", is_flag=True, help="Exit with 0 only if everything is safe, else with 8, 7 or 6."
)
@click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="URL",
    help="Also ask this mirror which saves wait for nodes of the job (may be repeated).  [default: ask none]",
)
@json_option
def command(root: Path, with_code: bool, mirrors: tuple[str, ...], as_json: bool) -> int:
    """Show which saves are not yet on every required mirror. Reads only the local disk; a trainer may be running.

    On several nodes, this is what this node knows. With --mirror, the mirror is asked what the whole save lacks: the
    nodes that have not finished, what is there of each, and what this node has still to send.

    With --exit-code, for a monitor, the exit code is 8 if uploads are pending or failed, 7 if this disk holds the only
    copy and no upload will change that, and 6 if something on the disk is damaged. Without it, the exit code is 0 if
    the status could be read.

    \b
    Examples:
      ckptmirror status /local-ssd/run-17
      ckptmirror status /local-ssd/run-17 --json | jq .unsafe_bytes
      ckptmirror status /local-ssd/run-17 --exit-code || page-someone
      ckptmirror status /local-ssd/run-17 --mirror gs://bucket/run-17
    """
    from ckptmirror.flow.status import read_awaited, read_status

    status = read_status(root, mirrors=mirrors)
    exit_code, verdict = _verdict(status)
    awaited: list[AwaitedSave] = []
    if mirrors:
        with progress("status") as pace:
            pace.doing("asking the mirror")
            awaited = read_awaited(root, mirrors, on_wait=pace.waiting)
    if as_json:
        print_json({**_facts(status), "waiting": [_awaited_facts(one) for one in awaited]})
        return exit_code if with_code else 0
    print_line(with_places(verdict, {"root": root}), "bold red" if exit_code else "bold green")
    if status.skipped:
        steps = f"step{'s' * (len(status.skipped) > 1)} {', '.join(map(str, status.skipped))}"
        were = "were" if len(status.skipped) > 1 else "was"
        print(f"NOT SAVED: {steps} {were} skipped because the disk was full: {status.skipped_why}")
    safe = "none on this disk" if status.newest_safe_step is None else status.newest_safe_step
    print(f"newest step {_or_none(status.newest_step)}, newest safe step {safe}")
    unsafe = "on no required mirror" if status.optional else "local only"
    print_table(_COLUMNS, [_cells(line, unsafe) for line in status.saves])
    for line in (one for one in status.saves if one.quarantined):
        print(f"quarantined: step {line.step} (save {line.save_id[:8]}): {line.quarantined}")
        print(f"  a start goes back past it, unless it is released: {_release(status, line)}")
    for url, lacking in status.pushed.items():
        has = f"lacks {lacking} of {_sent(status)} saves" if lacking else "has every save that is here"
        if why := status.pushed_awaited.get(url):
            has += f"; this node has sent all that it may: {behind_text(why)}"
        elif lacking:
            has += "; `ckptmirror drain` sends them"
        print(with_places(f"pushed: {url} {has}", {"root": status.root}))
    for one in awaited:
        print(f"waiting: {with_places(waiting_text(one.mirror, one.found, _of_this_node(one)), {'root': root})}")
    for name, why in status.problems.items():
        print(f"  problem: {name}: {why}")
    if status.trainer:
        print(_trainer(status))
    return exit_code if with_code else 0


def _of_this_node(one: AwaitedSave) -> str:
    """Say what this node has still to send of a save, and how; "" if it only waits for others."""
    if not one.unsent_files or one.this_node in one.found.parts.names:
        return ""
    files = f"{one.unsent_files} file{'s' if one.unsent_files > 1 else ''} ({size(one.unsent_bytes)})"
    sends = "`ckptmirror drain`" if one.is_queued else f"`ckptmirror push --mirror {one.mirror}`"
    return (
        f"this is node {one.this_node}, and {files} of it are not verified there: {sends} sends them, or says why not"
    )


def _awaited_facts(one: AwaitedSave) -> dict[str, Any]:
    unsent = {"unsent_files": one.unsent_files, "unsent_bytes": one.unsent_bytes}
    return {**waiting_facts(one.mirror, one.found), "this_node": one.this_node, **unsent}


def _verdict(status: Status) -> tuple[int, str]:
    """Return the exit code and the first line: what is not safe, the worst first."""
    error, sentence = _safety(status)
    if status.problems:
        error, more = IntegrityError, "`ckptmirror verify` shows what is damaged here, and the command that repairs it"
        sentence = f"{sentence}; {more}"
    return error.exit_code if error is not None else 0, sentence


def _safety(status: Status) -> tuple[type[CkptMirrorError] | None, str]:
    if not any(required for _, required in status.mirrors):
        if status.optional:
            url, lacking = min(status.optional.items(), key=lambda one: one[1])
            what = f"{url}, which {'was pushed to' if url in status.pushed else 'is optional'},"
            has = f"lacks {lacking} of {_sent(status)} saves" if lacking else "has every save that is here"
            return RefusedOnlyCopy, f"NOT SAFE: no required mirror is configured; {what} {has}"
        what = "no required mirror is configured; the local disk holds the only copy"
        return RefusedOnlyCopy, f"NOT SAFE: {what}; `ckptmirror push --mirror URL` makes another"
    if status.unsafe_files and status.unsafe_files == len(status.awaited):
        what = "NOT SAFE: this node has sent all that it may"
        if is_behind_text(status.awaited[0]):
            what = "NOT SAFE: this node has sent all that it has, and when it last asked, other nodes had not"
        return DeadlinePassed, f"{what}: {behind_text(status.awaited[0])}"
    if status.unsafe_files:
        failed = f", {status.failed_files} of them failed" if status.failed_files else ""
        what = f"NOT SAFE: {status.unsafe_files} files ({size(status.unsafe_bytes)})"
        sends = "the trainer is sending them" if _is_running(status) else "`ckptmirror drain` sends them"
        then = "fix the cause, then `ckptmirror drain`" if failed else sends
        return DeadlinePassed, f"{what} are not verified on every required mirror{failed}; {then}"
    if status.unasked and not status.unsettled:
        silent = ", ".join(status.unasked)
        return DeadlinePassed, f"NOT SAFE: {silent} has not confirmed yet what it still has; `ckptmirror drain` asks it"
    if not status.is_mirrored(None):
        what = "there are saves that are not queued for upload yet; `ckptmirror drain` sends them"
        return DeadlinePassed, f"NOT SAFE: {what}"
    if status.emergency_step is not None:
        copy, is_whole = status.emergency_copy, status.emergency_whole
        what = on_no_mirror(status.emergency_step, copy, status.emergency_here, is_whole)
        is_safe = copy is not None and is_whole and _is_apart(copy, status.root)
        return (None, f"safe: {what}") if is_safe else (RefusedOnlyCopy, f"NOT SAFE: {what}")
    if not status.saves:
        none = "no save here is whole" if status.problems else "nothing is saved here yet"
        return None, f"{none}, and nothing waits for a mirror"
    safe = "safe: every save is verified on every required mirror"
    if left_off := [line for line in status.saves if line.without and line.standing == "current"]:
        steps = ", ".join(str(line.step) for line in left_off[-_NAMED:])
        url, why = next(iter(left_off[-1].without.items()))
        return None, f"{safe} that gets it; not on {url}: step {steps} ({plain_reason(why)})"
    return None, safe


def _is_apart(one: Path, other: Path) -> bool:
    """Whether two directories are on two disks, as far as the system reports."""
    try:
        return one.stat().st_dev != other.stat().st_dev
    except OSError:  # one of them has been removed
        return False


def _cells(line: SaveLine, unsafe: str) -> list[Cell]:
    open_on = "; ".join(f"{url}: {plain_reason(why)}" for url, why in line.waiting.items())
    safe = ", not on ".join(["safe", *line.without])
    return [
        str(line.step),
        "+".join(line.kinds),
        size(line.size_bytes),
        (line.standing, standing_style(line.standing)),
        line.save_id[:8],
        age_text(line.created_at_utc),
        (safe, "green") if line.safe else (open_on or unsafe, "red"),
    ]


def _release(status: Status, line: SaveLine) -> str:
    """Return what releases a save from quarantine: a command, or, on several nodes, of which one sees only its disk."""
    if line.nodes > 1:
        return f"start once with manager.resume(state, policy={line.save_id[:8]!r})"
    return with_places(f"`ckptmirror rewind --save {line.save_id[:8]}`", {"root": status.root})


def _is_running(status: Status) -> bool:
    """Whether a trainer seems to run here; one on another machine may."""
    return status.trainer.get("status") == _RUNNING and status.trainer_alive is not False


def _trainer(status: Status) -> str:
    facts = status.trainer
    what, host = facts.get("status"), facts.get("host")
    if what == _RUNNING and not _is_running(status):
        what = "died while running"
    elif what == "incomplete":
        what = "ended with uploads pending"
    where = f" on {host}, as it last said" if host is not None and status.trainer_alive is None else ""
    at_utc = str(facts.get("at_utc"))
    when = age_text(at_utc) if is_for_people() else at_utc
    return f"trainer: {what} (pid {facts.get('pid')}{where}, {when})"


def _sent(status: Status) -> int:
    """Return the number of saves that are uploaded to mirrors."""
    return sum(line.kinds != ("emergency",) for line in status.saves)


def _or_none(step: int | None) -> str:
    return "none" if step is None else str(step)


def _facts(status: Status) -> dict[str, Any]:
    return {
        "root": str(status.root),
        "mirrors": [
            {"url": url, "required": required, "pushed": url in status.pushed} for url, required in status.mirrors
        ],
        "newest_step": status.newest_step,
        "newest_safe_step": status.newest_safe_step,
        "unsafe_files": status.unsafe_files,
        "unsafe_bytes": status.unsafe_bytes,
        "failed_files": status.failed_files,
        "awaited": list(status.awaited),
        "unasked": list(status.unasked),
        "skipped": list(status.skipped),
        "emergency_step": status.emergency_step,
        "emergency_copy": str(status.emergency_copy) if status.emergency_copy is not None else None,
        "emergency_here": status.emergency_here,
        "emergency_whole": status.emergency_whole,
        "quarantined": [
            {
                "step": line.step,
                "save_id": line.save_id,
                "why": line.quarantined,
                "release": _release(status, line).strip("`"),
            }
            for line in status.saves
            if line.quarantined
        ],
        "saves": [
            {
                "step": line.step,
                "save_id": line.save_id,
                "kinds": list(line.kinds),
                "size_bytes": line.size_bytes,
                "standing": line.standing,
                "safe": line.safe,
                "without": dict(line.without),
                "waiting": dict(line.waiting),
            }
            for line in status.saves
        ],
        "trainer": dict(status.trainer),
        "trainer_alive": status.trainer_alive,
        "problems": dict(status.problems),
    }
