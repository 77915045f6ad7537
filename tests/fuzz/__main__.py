"""``python -m tests.fuzz``: fuzz the readers, or let one of them read the bytes of a finding again."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["ckptmirror", "tomllib"]):
    import torch

    from tests.fuzz.fuzzing import fuzz, repeat
    from tests.fuzz.readers import all_readers


def main() -> int:
    """Return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="for all readers together")
    parser.add_argument("--reader", default="", help="only the readers with this in their name")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="for the corpus and the findings")
    parser.add_argument("--repeat", type=Path, help="the bytes of a finding; --reader names who reads them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, of the tensors that a seed holds
    with tempfile.TemporaryDirectory(prefix="fuzz-run-") as folder:
        chosen = [one for one in all_readers(Path(folder)) if given.reader in one.name]
        if given.repeat is not None:
            (reader,) = [one for one in chosen if one.name == given.reader] or chosen
            what, details = repeat(reader, given.repeat.read_bytes()) or ("nothing that it must not do", "")
            print(f"{reader.name}: {what}\n{details}", end="")
            return 0
        print(f"seed {given.seed}, {given.seconds:g} s for {len(chosen)} readers")
        found = 0
        for number, reader in enumerate(chosen):
            done = fuzz(reader, given.folder, seconds=given.seconds / len(chosen), seed=given.seed + number)
            found += len(done.findings)
            missed = f", {len(done.not_repeated)} not repeated" if done.not_repeated else ""
            print(f"{done.executions:>10,} inputs {done.edges:>6,} edges  {reader.name}{missed}", flush=True)
            for one in done.findings:
                print(f"    {one.what} ({one.after})\n    {one.kept_at}", flush=True)
    print(f"{found} findings" if found != 1 else "1 finding")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
