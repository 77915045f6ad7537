"""The command line: one file per verb in this folder; each defines ``command`` and is found by its file name.

Rules:
* Data goes to stdout, everything else to stderr. ``--json`` prints one object.
* A user's mistake ends in one sentence, a hint and an exit code (``core.errors``), never in a traceback.
* Verbs import what they need when they run, so that ``--help`` and ``stage`` start at once; none imports torch.
* The handlers of Ctrl-C and SIGTERM are installed before anything else is imported.
"""

from __future__ import annotations

from ckptmirror.cli._interrupts import Interrupted, Interrupts

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; the console script exits with it.

    Args:
        argv: The arguments; None: those of the process, which then exists only for this one verb.
    """
    with Interrupts(own_process=argv is None) as interrupts:
        try:
            from ckptmirror.cli._program import run

            return interrupts.over(run(argv))
        except Interrupted as interrupted:
            interrupted.tell()
            return interrupted.exit_code
