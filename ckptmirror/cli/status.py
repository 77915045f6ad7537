"""``ckptmirror status``: what is not yet safe, first."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from ckptmirror.cli._options import json_option, print_json, root_option, size


@click.command()
@root_option
@json_option
def command(root: Path, as_json: bool) -> int:
    """Say how much training is not yet safe. Reads the local disk only; a trainer may be running.

    \b
    Examples:
      ckptmirror status --root /local-ssd/run-17
      ckptmirror status --json | jq .unsafe_bytes
    """
    from ckptmirror.flow.status import read_status

    status = read_status(root.absolute())
    if as_json:
        print_json(dataclasses.asdict(status))
        return 0
    if status.unsafe_files:
        failed = f", {status.failed_files} of them failed" if status.failed_files else ""
        print(
            f"NOT SAFE: {status.unsafe_files} files ({size(status.unsafe_bytes)}) are not verified on a mirror{failed}"
        )
    elif not any(required for _, required in status.mirrors):
        print("NOT SAFE: no required mirror is configured; the local disk holds the only copy")
    else:
        print("safe: every save is verified on every required mirror")
    print(f"newest step {_or_none(status.newest_step)}, newest safe step {_or_none(status.newest_safe_step)}")
    for line in status.saves:
        safety = (
            "safe" if line.safe else "; ".join(f"{url}: {why}" for url, why in line.waiting.items()) or "local only"
        )
        print(f"  {line.step:>9}  {'+'.join(line.kinds):<10} {size(line.size_bytes):>10}  {line.standing:<10} {safety}")
    for name, why in status.problems.items():
        print(f"  problem: {name}: {why}")
    if status.trainer:
        print(
            f"trainer: {status.trainer.get('status')} (pid {status.trainer.get('pid')}, {status.trainer.get('at_utc')})"
        )
    return 0


def _or_none(step: int | None) -> str:
    return "none" if step is None else str(step)
