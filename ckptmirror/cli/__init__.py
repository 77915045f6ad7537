"""The command line: one file per verb in this folder; each defines ``command`` and is found by its file name.

Rules:
* Data goes to stdout, everything else to stderr. ``--json`` prints one object.
* A user's mistake ends in one sentence, a hint and an exit code (``core.errors``), never in a traceback.
* Verbs import what they need when they run, so that ``--help`` and ``stage`` start in a blink; none imports torch.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from pkgutil import iter_modules

import click

from ckptmirror.core.errors import CkptMirrorError

__all__ = ["main"]


class Verbs(click.Group):
    """Finds the verbs by listing this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all verbs."""
        return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one verb; None if there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"ckptmirror.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "CKPTMIRROR"})
@click.option("-v", "--verbose", is_flag=True, help="Log what happens to stderr, and show tracebacks.")
@click.version_option(package_name="ckptmirror")
def program(verbose: bool) -> None:
    """Mirror PyTorch checkpoints from local SSD to object storage; never delete the only copy."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; the console script exits with it."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = program.main(arguments, prog_name="ckptmirror", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return int(stop.exit_code)
    except click.Abort:
        print("ckptmirror: interrupted; the same command continues where it stopped.", file=sys.stderr)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        print("ckptmirror: interrupted; the same command continues where it stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CkptMirrorError as error:
        if "-v" in arguments or "--verbose" in arguments:
            logging.getLogger("ckptmirror").exception("the verb failed")
        print(f"ckptmirror: {error}\n  {error.hint}", file=sys.stderr)
        return error.exit_code
    return code if isinstance(code, int) else 0
