"""``ckptmirror diff``: which tensors two saves hold alike."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import json_option, print_json
from ckptmirror.cli._tables import Column, print_table

_COLUMNS = (Column("WHAT", 14), Column("TENSOR"))
_STYLES = {"differs": "yellow", "not compared": "dim"}


@exit_codes(3, 4, 5, 6, 10, 12)
@click.command(short_help="Compare two saves, tensor by tensor.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--exit-code", "fails", is_flag=True, help="Exit with 1 if the saves are not equal.")
@json_option
def command(first: str, second: str, fails: bool, as_json: bool) -> int:
    """Compare two saves, tensor by tensor: model, optimizer and averages, however each was sharded.

    A and B are a save (its DCP directory, model file, meta or emergency directory, also on a mirror), or a directory or
    mirror, for its newest save. Only the lists of fingerprints are read, not the tensors.

    \b
    Examples:
      ckptmirror diff /local-ssd/run-17/dcp_000100 /local-ssd/run-17/dcp_000200
      ckptmirror diff /local-ssd/run-17 gs://bucket/run-17
    """
    from ckptmirror.core.tensor_proof import difference
    from ckptmirror.flow.fetch.tensor_lists import all_lists
    from ckptmirror.flow.places.resolve import resolve_checkpoint_reference

    saves = [resolve_checkpoint_reference(one) for one in (first, second)]
    found = difference(*(all_lists(save) for save in saves))
    rows = [
        *(("differs", name) for name in found.differ),
        *(("other shape", name) for name in found.reshaped),
        *(("only in A", name) for name in found.only_first),
        *(("only in B", name) for name in found.only_second),
        *(("not compared", name) for name in found.not_compared),
    ]
    if as_json:
        facts: dict[str, Any] = {
            key: {"place": str(save.dir), "step": save.step, "kind": save.kind, "save_id": save.save_id}
            for key, save in zip(("first", "second"), saves, strict=True)
        }
        print_json({**facts, **{field: list(names) for field, names in found._asdict().items()}})
    else:
        print_table(_COLUMNS, [[(what, _STYLES.get(what, "red")), name] for what, name in rows])
        steps = " and ".join(f"step {save.step} in {save.dir}" for save in saves)
        print(f"{len(found.equal)} tensors are equal, {len(rows)} are not, in {steps}", file=sys.stderr)
    return 1 if fails and rows else 0
