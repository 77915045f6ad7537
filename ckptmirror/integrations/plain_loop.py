"""A plain PyTorch loop with ckptmirror in it: what `ckptmirror demo` runs, and an example to copy from.

    torchrun --nproc-per-node 2 -m ckptmirror.integrations.plain_loop --root /local-ssd/run --mirror gs://bucket/run
    --steps 60

It trains a small byte-level transformer, data parallel, on text that every machine has: the standard library's own
sources. The TrainState holds everything that the next step depends on: weights, AdamW, schedule, EMA, dropout's random
numbers and the position in the data; and DDP has its final buckets before the first step. So a run that was killed and
restarted by the same command prints the same losses, bit for bit, as a run that was not, on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import CheckpointManager, Retention, StopRequest, TrainState
from ckptmirror.integrations.ddp import rebuild_buckets

__all__ = ["ByteTransformer", "SourceText", "build_state", "evaluate", "main"]

CONTEXT = 64
BATCH = 8


def _average(shadow: Tensor, weight: Tensor, _: Tensor | int) -> Tensor:
    return shadow.lerp(weight, 0.05)


class ByteTransformer(nn.Module):
    """Predicts the next byte.

    Args:
        width: Size of the hidden state; a multiple of 32.
        layers: Number of blocks.
    """

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight  # tied, as language models do
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes of shape (batch, CONTEXT) to logits of shape (batch, CONTEXT, 256)."""
        hidden = self.embed(text) + self.position
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class SourceText:
    """Batches of text from the standard library's sources.

    Its state is its position, so that a resume repeats and skips no batch.
    """

    def __init__(self, rank: int, world_size: int, files: int = 40) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:files])
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._rank, self._world_size = rank, world_size
        self._position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each of shape (BATCH, CONTEXT)."""
        start = (self._position * self._world_size + self._rank) * BATCH * CONTEXT
        self._position += 1
        index = (start + torch.arange(BATCH * CONTEXT + 1)) % len(self._text)
        piece = self._text[index].long()
        return piece[:-1].view(BATCH, CONTEXT), piece[1:].view(BATCH, CONTEXT)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._position = state["position"]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def build_state(rank: int, world_size: int, *, wrap: bool) -> TrainState:
    """Create model, optimizer, schedule, EMA and data, all at their start; ``wrap`` for data parallel training."""
    torch.manual_seed(1234)
    plain = ByteTransformer()
    ema = torch.optim.swa_utils.AveragedModel(plain, avg_fn=_average)
    model: nn.Module = plain
    if wrap:
        model = DistributedDataParallel(plain)
        blank = torch.zeros(BATCH, CONTEXT, dtype=torch.long)
        rebuild_buckets(model, lambda model: loss_of(model, blank, blank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=30)
    torch.manual_seed(5678 + rank)  # from here on dropout differs between ranks
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        ema=ema,
        dataloader=SourceText(rank, world_size),
        training_config={"context": CONTEXT, "batch": BATCH, "lr": 3e-3},
    )


def train_step(state: TrainState) -> float:
    """Do one step and return this rank's loss."""
    inputs, targets = state.dataloader.next()
    loss = loss_of(state.model, inputs, targets)
    state.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    state.optimizer.step()
    state.scheduler.step()
    state.ema.update_parameters(getattr(state.model, "module", state.model))
    return loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, batches: int = 4) -> float:
    """Return the mean loss, without dropout, over text that training never sees."""
    text = SourceText(0, 1)
    text.load_state_dict({"position": 500})
    model.eval()
    return float(torch.stack([loss_of(model, *text.next()) for _ in range(batches)]).mean())


def run(args: argparse.Namespace) -> None:
    """Train to ``args.steps``, resuming from the newest save if there is one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = build_state(rank, world_size, wrap=True)
    log = Path(args.notes) if args.notes and rank == 0 else None
    stop = StopRequest().install()
    manager = CheckpointManager(
        args.root,
        mirrors=args.mirror,
        retention=Retention(keep_last=args.keep_last),
        persistent_dir=args.persistent_dir,
    )
    start = manager.resume(state)
    first = 1 if start is None else start.step + 1
    note(log, event="start", step=first - 1, kind=start and start.kind, place=start and start.place, pid=os.getpid())
    for step in range(first, args.steps + 1):
        loss = train_step(state)
        note(log, event="step", step=step, loss=loss.hex())
        if step % args.save_every == 0 or step == args.steps:
            manager.save(step, state, metrics={"loss": loss})
        if stop.check(manager.ranks):
            manager.save_emergency_checkpoint(step, state)
            note(log, event="stopped", step=step, reason=stop.reason)
            break
    manager.close(stop=stop)
    if not stop.requested:
        note(log, event="finished", step=args.steps, eval_loss=evaluate(state.model.module).hex())
    dist.barrier()


def note(log: Path | None, **facts: Any) -> None:
    """Append one line of JSON to the log."""
    if log is not None:
        with log.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, join the process group, train."""
    parser = argparse.ArgumentParser(description="Train a small byte-level transformer with ckptmirror.")
    parser.add_argument("--root", required=True, help="directory on local disk")
    parser.add_argument("--mirror", action="append", default=[], help="mirror URL (may be repeated)")
    parser.add_argument("--persistent-dir", help="where emergency snapshots are copied to")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--keep-last", type=int, default=None)
    parser.add_argument("--notes", help="write one JSON line per step here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
