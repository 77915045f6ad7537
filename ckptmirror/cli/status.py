"""``ckptmirror status``: what is not yet safe, first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._next_command import with_places
from ckptmirror.cli._options import json_option, on_no_mirror, print_json, root_option, size
from ckptmirror.core.printable import printable_text

if TYPE_CHECKING:
    from ckptmirror.flow.status import SaveLine, Status


@exit_codes(6, 10, 11)
@click.command(short_help="Say how much training is not yet safe.")
@root_option
@json_option
def command(root: Path, as_json: bool) -> int:
    """Say how much training is not yet safe. Reads the local disk only; a trainer may be running.

    \b
    Examples:
      ckptmirror status --root /local-ssd/run-17
      ckptmirror status --root /local-ssd/run-17 --json | jq .unsafe_bytes
    """
    from ckptmirror.flow.status import read_status

    status = read_status(root)
    if as_json:
        print_json(_facts(status))
        return 0
    print(with_places(_verdict(status), {"root": root}))
    if status.skipped:
        steps = f"step{'s' * (len(status.skipped) > 1)} {', '.join(map(str, status.skipped))}"
        were = "were" if len(status.skipped) > 1 else "was"
        print(f"NOT SAVED: {steps} {were} skipped, the disk had no room: {printable_text(status.skipped_why)}")
    print(f"newest step {_or_none(status.newest_step)}, newest safe step {_or_none(status.newest_safe_step)}")
    for line in status.saves:
        kinds = "+".join(line.kinds)
        print(f"  {line.step:>9}  {kinds:<10} {size(line.size_bytes):>10}  {line.standing:<10} {_safety(line)}")
    for url, lacking in status.pushed.items():
        has = f"lacks {lacking} of {_sent(status)} saves; `ckptmirror drain` sends them"
        print(with_places(f"pushed: {url} {has if lacking else 'has every save that is here'}", {"root": status.root}))
    for name, why in status.problems.items():
        print(f"  problem: {name}: {why}")
    if trainer := status.trainer:
        print(f"trainer: {trainer.get('status')} (pid {trainer.get('pid')}, {trainer.get('at_utc')})")
    return 0


def _verdict(status: Status) -> str:
    if not any(required for _, required in status.mirrors):
        return "NOT SAFE: no required mirror is configured; the local disk holds the only copy"
    if status.unsafe_files:
        failed = f", {status.failed_files} of them failed" if status.failed_files else ""
        what = f"{status.unsafe_files} files ({size(status.unsafe_bytes)})"
        mended = "; mend their cause, then `ckptmirror drain`" if failed else ""
        return f"NOT SAFE: {what} are not verified on every required mirror{failed}{mended}"
    if status.unasked and not status.unsettled:
        silent = ", ".join(status.unasked)
        return f"NOT SAFE: {silent} has yet to say what it still has; `ckptmirror drain` asks"
    if not status.is_mirrored(None):
        return "NOT SAFE: there are saves without upload records; `ckptmirror drain` makes and finishes them"
    if status.emergency_step is not None:
        is_apart = status.emergency_copy is not None and _is_apart(status.emergency_copy, status.root)
        what = on_no_mirror(status.emergency_step, status.emergency_copy)
        return f"{'safe' if is_apart else 'NOT SAFE'}: {what}"
    if not status.saves:
        return "nothing is saved here yet, and nothing waits for a mirror"
    return "safe: every save is verified on every required mirror"


def _is_apart(one: Path, other: Path) -> bool:
    """Whether two directories lie on two disks, as far as the system tells."""
    try:
        return one.stat().st_dev != other.stat().st_dev
    except OSError:  # one of them went away since
        return False


def _safety(line: SaveLine) -> str:
    if line.safe:
        return "safe"
    return "; ".join(f"{url}: {why}" for url, why in line.waiting.items()) or "local only"


def _sent(status: Status) -> int:
    """How many saves there are that mirrors get."""
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
        "unasked": list(status.unasked),
        "skipped": list(status.skipped),
        "emergency_step": status.emergency_step,
        "emergency_copy": str(status.emergency_copy) if status.emergency_copy is not None else None,
        "saves": [
            {
                "step": line.step,
                "save_id": line.save_id,
                "kinds": list(line.kinds),
                "size_bytes": line.size_bytes,
                "standing": line.standing,
                "safe": line.safe,
                "waiting": dict(line.waiting),
            }
            for line in status.saves
        ],
        "trainer": dict(status.trainer),
        "problems": dict(status.problems),
    }
