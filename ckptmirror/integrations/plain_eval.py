"""Evaluate a staged checkpoint of the plain loop: what an eval host does after ``ckptmirror stage``.

python -m ckptmirror.integrations.plain_eval "$(ckptmirror stage --step 60 --kind dcp --mirror gs://bucket/run)"
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from ckptmirror import load_checkpoint
from ckptmirror.integrations.plain_loop import ByteTransformer, evaluate

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Load each reference and print its step, kind and loss as one line of JSON."""
    parser = argparse.ArgumentParser(description="Evaluate checkpoints of the plain loop.")
    parser.add_argument("reference", nargs="+", help="what `ckptmirror stage` printed")
    torch.set_num_threads(1)
    for reference in parser.parse_args(argv).reference:
        loaded = load_checkpoint(reference)
        model = ByteTransformer()
        model.load_state_dict(loaded.model)
        print(json.dumps({"step": loaded.meta.step, "kind": loaded.kind, "eval_loss": evaluate(model).hex()}))


if __name__ == "__main__":
    main()
