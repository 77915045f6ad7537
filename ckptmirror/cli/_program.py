"""The program behind ``ckptmirror``: finds the verbs, runs one, and turns whatever it raises into an exit code."""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TextIO

import click

from ckptmirror import cli
from ckptmirror.cli._next_command import completing_hints
from ckptmirror.cli._options import demanding_signatures, show_verbose, verbose_option
from ckptmirror.cli._streams import printable_streams
from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.local.storage_errors import disk_error

__all__ = ["program", "run"]


_WITHOUT_KEYS = ("config", "demo")  # one shows the settings, the other has its own
_HELP = "See `ckptmirror --help`, and `--help` of the verb."
_SAME_ELSEWHERE = {
    **dict.fromkeys(("list", "dir"), "ls"),
    **dict.fromkeys(("download", "fetch", "get", "pull", "restore"), "stage"),
    **dict.fromkeys(("upload", "put", "copy", "cp", "sync", "mirror"), "push"),
    **dict.fromkeys(("check", "fsck", "scrub"), "verify"),
    **dict.fromkeys(("prune", "delete", "rm", "clean", "gc"), "rotate"),
    **dict.fromkeys(("rollback", "revert", "reset"), "rewind"),
    **dict.fromkeys(("finish", "flush", "wait"), "drain"),
    **dict.fromkeys(("info", "show"), "status"),
}
"""What the verbs are called in other tools."""


class Verbs(click.Group):
    """Finds the verbs by listing this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the interface is click's
        """Return the names of all verbs."""
        modules = (module.name for module in iter_modules(cli.__path__))
        return sorted(name.replace("_", "-") for name in modules if not name.startswith("_"))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb of a command line.

        Raises:
            UsageError: There is none of that name; the message suggests the closest ones.
        """
        known, name = self.list_commands(ctx), args[0]
        if name in known or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        near = [_SAME_ELSEWHERE[name]] if name in _SAME_ELSEWHERE else []
        near = near or [verb for verb in known if verb.startswith(name)] or get_close_matches(name, known)
        meant = " or ".join(f"`ckptmirror {verb}`" for verb in near)
        what = f"Did you mean {meant}?" if near else f"The commands are {', '.join(known)}."
        raise click.UsageError(f"No such command {name!r}. {what}", ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one verb; None if there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"ckptmirror.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        if all(parameter.name != "verbose" for parameter in command.params):
            verbose_option(command)
        completing_hints(command)
        if cmd_name not in _WITHOUT_KEYS:
            demanding_signatures(command)
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@verbose_option
@click.version_option(package_name="ckptmirror")
def program() -> None:
    """Mirror PyTorch checkpoints from local SSD to object storage; never delete the only copy.

    Data goes to stdout; progress, warnings and errors go to stderr. Options that you leave out come from the settings:
    a file, or CKPTMIRROR_ variables (`ckptmirror config` shows them). Each verb has its own --help, with examples and
    exit codes.

    \b
    Examples:
      ckptmirror status /local-ssd/run-17
      ckptmirror stage gs://bucket/run-17 --step latest --dest /scratch/eval
    """


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``: while a bar is shown, this prints the line above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self.stream = sys.stderr
        super().emit(record)


def run(arguments: list[str] | None) -> int:
    """Run one verb and return its exit code. Only a signal's ``Interrupted`` and a deliberate SystemExit leave it."""
    with printable_streams():
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    logging.basicConfig(handlers=[_ToStderr()], level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("google").setLevel(logging.ERROR)  # our own errors report what it warns of
    try:
        code = program.main(arguments, prog_name="ckptmirror", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except CkptMirrorError as error:
        hint = _HELP if error.hint == UsageError.hint else error.hint
        return _print_error(error, str(error), hint, error.exit_code)
    except OSError as error:
        _forget_stdout()
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            explained = disk_error(error, "use", Path(error.filename))
            return _print_error(error, str(explained), explained.hint, explained.exit_code)
        where = f"{error.filename}: " if error.filename is not None else ""
        return _print_error(
            error, f"{where}{error.strerror or error}", "Check the path, its permissions and its disk.", 1
        )
    except Exception as error:  # noqa: BLE001 - the last resort: a sentence, and the traceback on demand
        return _print_error(error, f"{type(error).__name__}: {error}", CkptMirrorError.hint, 1)
    return code if isinstance(code, int) else 0


def _print_error(error: Exception, sentence: str, hint: str, exit_code: int) -> int:
    if show_verbose():
        logging.getLogger("ckptmirror").error("the verb failed", exc_info=error)
    print(f"ckptmirror: {sentence}\n  {hint}", file=sys.stderr)
    return exit_code


def _forget_stdout() -> None:
    """Replace stdout, which cannot be written or has no reader, so that its buffer does not fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
