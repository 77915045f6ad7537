"""``ckptmirror verify``: is every save of a root or a mirror what was saved?"""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._human_text import size
from ckptmirror.cli._options import DIRECTORY, configured_place, json_option, print_json, step_option
from ckptmirror.cli._progress import progress
from ckptmirror.cli._tables import SAVE_COLUMNS, Cell, Column, print_table, standing_style
from ckptmirror.cli._waiting_saves import waiting_facts, waiting_text
from ckptmirror.core.errors import IntegrityError, NotAuthorised, Temporary, UsageError
from ckptmirror.core.reach import access_hint

if TYPE_CHECKING:
    from ckptmirror.flow.verify.verify import Target, Verification, VerifiedSave

_ERROR_OF = {"damaged": IntegrityError, "unreadable": Temporary, "refused": NotAuthorised}
_READ_AGAIN = (
    "Try the same command again, with a later ckptmirror where a version is named; `ckptmirror verify --verbose` logs "
    "what happens."
)
_BELIEVED = (
    "What is not believed is never loaded here: docs/security.md says what is, and how an older run comes to be signed."
)
_COLUMNS = (*SAVE_COLUMNS, Column("STATE"))


@exit_codes(3, 5, 6, 10, 12)
@click.command(short_help="Check every save of a root or a mirror.")
@click.argument("reference", required=False, metavar="[REFERENCE]")
@click.option(
    "--root",
    type=DIRECTORY,
    help="A directory of saves, such as a trainer's root.  [default: REFERENCE]",
)
@click.option(
    "--mirror", "mirrors", multiple=True, metavar="URL", help="A mirror (may be repeated).  [default: REFERENCE]"
)
@step_option("Only the saves of this step.  [default: all]")
@click.option("--deep", is_flag=True, help="Read every byte and compare its checksum.")
@click.option("--tensors", is_flag=True, help="Compare every tensor in the files with what memory held at the save.")
@json_option
def command(
    reference: str | None,
    root: Path | None,
    mirrors: tuple[str, ...],
    step: int | None,
    deep: bool,
    tensors: bool,
    as_json: bool,
) -> int:
    """Check every save of a root or a mirror: does every file that its meta names exist, with the right size?

    REFERENCE is a directory, a mirror's URL, or one save in either. With --root and --mirror, both are checked; if you
    add --deep, files that are damaged on a mirror of that root become pending again, and are sent once more. Nothing
    else is changed, and a trainer may be running. Without any of them, it checks the first mirror in the
    settings, else the root in the settings, else this directory.

    Exit code 6 means that a current save is damaged.

    \b
    Examples:
      ckptmirror verify /local-ssd/run-17
      ckptmirror verify gs://bucket/run-17 --step 5000 --deep
      ckptmirror verify /local-ssd/run-17 --tensors
      ckptmirror verify --root /local-ssd/run-17 --mirror gs://bucket/run-17 --deep
    """
    target = _target(reference, root, mirrors)
    from ckptmirror.flow.verify.verify import verify

    with progress("verify") as pace:
        pace.doing("listing the saves")
        found = verify(target, step=step, deep=deep, tensors=tensors, on_progress=pace, on_wait=pace.waiting)
    if as_json:
        print_json(_facts(found))
    else:
        _print(found)
    for note in [*found.notes, *(waiting_text(url, one) for url, one in found.waiting)]:
        print(f"note: {note}", file=sys.stderr)
    return _print_result(found, target)


def _target(reference: str | None, root: Path | None, mirrors: tuple[str, ...]) -> Target:
    from ckptmirror.flow.verify.verify import target_in, target_of

    if reference is not None and (root is not None or mirrors):
        raise UsageError(
            "Give REFERENCE, or --root and --mirror, not both.", hint="See `ckptmirror verify --help` for examples."
        )
    if root is not None or mirrors:
        return target_in(root, mirrors)
    return target_of(reference if reference is not None else configured_place())


def _print(found: Verification) -> None:
    places = dict.fromkeys(save.place for save in found.saves)
    for place in places:
        if len(places) > 1:
            print(f"{place}:")
        lines = []
        for save in found.saves:
            if save.place == place:
                lines.append(_cells(save, found))
        print_table(_COLUMNS, lines)
    sys.stdout.flush()


def _cells(save: VerifiedSave, found: Verification) -> list[Cell]:
    verdict = save.verdict
    return [
        "?" if verdict.step is None else str(verdict.step),
        "+".join(verdict.kinds) or "-",
        size(save.size_bytes),
        (verdict.standing, standing_style(verdict.standing)),
        save.save_id[:8],
        _state(save, found),
    ]


def _state(save: VerifiedSave, found: Verification) -> Cell:
    state = save.verdict.state
    if state == "whole":
        what = f"whole ({save.part})" if save.part else "whole"
        return what + (", every byte" if found.deep else "") + _tensors(save), "green"
    more = f" (and {len(save.faults) - 1} more)" if len(save.faults) > 1 else ""
    wrong = f"{save.faults[0] if save.faults else save.meta}{more}"
    if save.whole_kinds and save.whole_kinds == save.verdict.kinds:
        wrong += "; no load needs it"
    elif save.whole_kinds:
        wrong += f"; in kind {'+'.join(save.whole_kinds)} it is whole"
    if state != "damaged":
        return f"not read: {wrong}", "yellow"
    copy = _whole_on(save, found)
    then = save.mend or (f"it is whole on {copy}" if copy else "")
    if save.not_signed:
        return f"NOT BELIEVED: {wrong}" + f" -> {then}" * bool(then), "red"
    return f"DAMAGED: {wrong} -> {then or 'no good copy is known'}", "red"


def _whole_on(save: VerifiedSave, found: Verification) -> str:
    """Return a mirror that has a damaged save whole; "" if none was found. A disk may have one node's part alone."""
    there = (other for other in found.saves if save.save_id and other.save_id == save.save_id and "://" in other.place)
    return next((other.place for other in there if other.verdict.state == "whole"), "")


def _tensors(save: VerifiedSave) -> str:
    """Say how many tensors are what was saved."""
    if save.tensors is None:
        return ""
    equal = {name for one in save.tensors for name in one.equal}
    others = {name for one in save.tensors for name in one.not_compared} - equal
    return f", {len(equal)} tensors" + (f" ({len(others)} not compared)" if others else "")


def _print_result(found: Verification, target: Target) -> int:
    """Print the summary on stderr, and return the exit code."""
    not_signed = sum(save.not_signed for save in found.saves)
    damaged = sum(save.verdict.state == "damaged" for save in found.saves) - not_signed
    unread = sum(save.verdict.state in ("unreadable", "refused") for save in found.saves)
    what = "saves and parts of saves" if any(save.part for save in found.saves) else "saves"
    parts = [f"{len(found.saves) - damaged - unread - not_signed} of {len(found.saves)} {what} are whole"]
    parts += [f"{damaged} damaged"] * bool(damaged) + [f"{not_signed} not believed"] * bool(not_signed)
    parts += [f"{unread} could not be read"] * bool(unread)
    if found.deep:
        parts.append(f"{size(sum(save.read_bytes for save in found.saves))} read")
    if found.pending_again:
        files = "file" if found.pending_again == 1 else "files"
        parts.append(f"{found.pending_again} {files} on the mirror will be sent again")
    error = _ERROR_OF.get(found.outcome)
    if error is None:
        aside = "; those are off the lineage, and no run continues from them" if damaged or unread or not_signed else ""
        print("; ".join(parts) + aside, file=sys.stderr)
        return 0
    print(f"ckptmirror: {'; '.join(parts)}.\n  {_hint(found, target)}", file=sys.stderr)
    return error.exit_code


def _hint(found: Verification, target: Target) -> str:
    if found.outcome == "unreadable":
        return _READ_AGAIN
    if found.outcome == "refused":
        return access_hint(save.place for save in found.saves if save.verdict.state == "refused")
    return _after_damage(found, target)


def _after_damage(found: Verification, target: Target) -> str:
    """Say what to do about damage: for the saves with a command that repairs them, and for the others."""
    wrong = [save for save in found.saves for one in save.tensors or () if one.differ]
    if wrong and not found.deep:
        return "With --deep, it also says whether the bytes are those that were written, and what repairs them if not."
    if wrong:
        return (
            "A tensor whose bytes are those that were written was written wrong: use another kind or save. Report it."
        )
    damaged = [save for save in found.saves if save.verdict.state == "damaged" and (save.mend or not save.not_signed)]
    hints = [_BELIEVED] * any(save.not_signed and not save.mend for save in found.saves)
    hints += ["A line with a command: the command repairs that save."] * any(save.mend for save in damaged)
    copies = [_whole_on(save, found) for save in damaged if not save.mend]
    if any(copies):
        hints.append(_hint_of_copy(found, target))
    if not all(copies):
        deep = " --deep" if found.deep else ""
        if target.root is None:
            mirrors = "".join(f" --mirror {quote(url)}" for url in target.mirrors)
            hints.append(
                "No good copy is known: if you have the root of the run, look there with "
                f"`ckptmirror verify --root DIR{mirrors}{deep}`."
            )
        elif not target.mirrors:
            hints.append(
                "No good copy is known: if the run has a mirror, look there with "
                f"`ckptmirror verify --root {quote(str(target.root))} --mirror URL{deep}`."
            )
        else:
            hints.append("No good copy is known: if the run has another mirror, add its --mirror URL.")
    return " ".join(hints)


def _hint_of_copy(found: Verification, target: Target) -> str:
    if target.root is not None:
        return (
            "What is whole on another mirror is brought from there by `ckptmirror stage --step N --full --mirror URL "
            "--dest DIR`."
        )
    mirrors = "".join(f" --mirror {quote(url)}" for url in target.mirrors)
    return (
        "What is whole on another mirror is sent again from the root of the run: "
        f"`ckptmirror verify --root DIR{mirrors}{' --deep' if found.deep else ''}` names the command."
    )


def _facts(found: Verification) -> dict[str, Any]:
    return {
        "deep": found.deep,
        "outcome": found.outcome,
        "pending_again": found.pending_again,
        "notes": list(found.notes),
        "waiting": [waiting_facts(url, one) for url, one in found.waiting],
        "saves": [
            {
                "place": save.place,
                "meta": save.meta,
                "step": save.verdict.step,
                "kinds": list(save.verdict.kinds),
                "standing": save.verdict.standing,
                "save_id": save.save_id,
                "state": save.verdict.state,
                "faults": list(save.faults),
                "files": save.files,
                "size_bytes": save.size_bytes,
                "read_bytes": save.read_bytes,
                "mend": save.mend,
                "not_signed": save.not_signed,
                "whole_kinds": list(save.whole_kinds),
                "part": save.part,
                "tensors": None
                if save.tensors is None
                else [{field: _plain(value) for field, value in one._asdict().items()} for one in save.tensors],
            }
            for save in found.saves
        ],
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
