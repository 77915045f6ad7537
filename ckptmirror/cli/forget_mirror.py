"""``ckptmirror forget-mirror``: take a mirror that is gone for good out of the run."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import json_option, print_json, root_option


@exit_codes(3, 5, 10, 11)
@click.command("forget-mirror", short_help="Take a mirror that is gone for good out of the run.")
@root_option
@click.option("--url", required=True, metavar="URL", help="The mirror; it does not have to answer.")
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@json_option
def command(root: Path, url: str, dry_run: bool, as_json: bool) -> int:
    """Take a mirror that is gone for good out of the run: no start waits for it any longer.

    Starts and drains wait for each required mirror of the run, because it may hold something newer. With this command
    you give up whatever only that mirror holds. Nothing is deleted, here or there.

    \b
    Examples:
      ckptmirror forget-mirror --root /local-ssd/run-17 --url gs://old-bucket/run-17 --dry-run
      ckptmirror forget-mirror --root /local-ssd/run-17 --url gs://old-bucket/run-17
    """
    from ckptmirror.flow.start.forget import forget_mirror

    done = forget_mirror(root, url, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "root": str(root),
                "url": done.url,
                "dry_run": dry_run,
                "left": list(done.left),
                "told": list(done.recorded_on),
                "untold": done.unreachable,
                "configured": done.is_configured,
                "continued_from": done.before.step if done.before is not None else None,
                "continues_from": done.after.step if done.after is not None else None,
            }
        )
        return 0
    would, requires = ("would ", "require") if dry_run else ("", "requires")
    left = ", ".join(done.left) or "no mirror"
    no_longer = f"The run {would}no longer {requires} {done.url}"
    if not done.was_required:
        no_longer = f"The run does not require {done.url}; nothing more {'would be' if dry_run else 'is'} sent there"
    print(f"{no_longer}. It {would or 'now '}{requires} {left}.")
    for one, why in done.unreachable.items():
        print(f"{one} does not answer ({why}); the next start records it there", file=sys.stderr)
    if done.unreachable:
        print(
            "If somebody went back, that mirror may know of it: then the next start continues from there, and says so.",
            file=sys.stderr,
        )
    if done.before is not None and (done.after is None or done.after.save_id != done.before.save_id):
        where = f"from step {done.after.step}" if done.after is not None else "at step 0"
        back = f"ckptmirror rewind --root {quote(str(root))} --save {done.before.save_id[:8]}"
        print(
            f"Without it the next start continues {where}, not from step {done.before.step}: somebody went back, as "
            f"the other mirrors say. To continue from step {done.before.step}, run `{back}`.",
            file=sys.stderr,
        )
    if done.is_configured and not done.left:
        print(
            "It was the last one: drains wait for it until the trainer starts with another mirror, or with none.",
            file=sys.stderr,
        )
    if done.is_configured:
        print(
            f"If the trainer's `mirrors` still have {done.url}, remove it there: its next start would use it again.",
            file=sys.stderr,
        )
    return 0
