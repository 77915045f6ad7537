"""The exit codes that a verb's ``--help`` names, in the words of docs/reference/exit-codes.md."""

from __future__ import annotations

from collections.abc import Callable

import click

__all__ = ["MEANINGS", "exit_codes"]

MEANINGS = {
    0: "done",
    1: "unexpected, or stdout could not be written",
    2: "usage: wrong arguments",
    3: "step not found",
    4: "the step is there, the kind is not",
    5: "temporary: the same command may work later",
    6: "integrity: what is there is not what was saved",
    7: "refused: this may be the only copy, or it belongs to another run",
    8: "the deadline passed, or files failed: uploads are pending",
    10: "bad configuration, or no table",
    11: "locked by another process",
    12: "not authorised",
    130: "interrupted (Ctrl-C) after a clean stop",
    143: "terminated (SIGTERM) after a clean stop",
}
_EVERY = (0, 1, 2, 130, 143)


def exit_codes(*codes: int) -> Callable[[click.Command], click.Command]:
    """Name in a verb's help the codes that it exits with, beside those of every verb."""

    def name(command: click.Command) -> click.Command:
        lines = [f"  {code:<4} {MEANINGS[code]}" for code in sorted({*_EVERY, *codes})]
        command.epilog = "\b\nExit codes:\n" + "\n".join(lines)
        return command

    return name
