"""An interrupt (Ctrl-C) while a save is made, wherever it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

from ckptmirror import TrainState
from ckptmirror.flow.save import handle, save, save_parts
from ckptmirror.ranks import host_copy
from tests.small_training import running


class Interrupting:
    """Raises a KeyboardInterrupt at the n-th entry or return within the files of a save: where a real one comes.

    Attributes:
        seen: How many such places it has passed.
    """

    FILES = (save.__file__, save_parts.__file__, handle.__file__, host_copy.__file__)

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "c_call" or self.seen >= self.at or frame.f_code.co_filename not in self.FILES:
            return
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupting:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_an_interrupt_anywhere_in_a_save_leaves_it_ended_or_to_the_background_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    state, step, interrupted = TrainState(model), 0, 0
    with running(tmp_path, kinds=("model",)) as manager:
        manager.resume(state)
        manager.save(step, state).wait()
        at = 0
        while True:
            at, step = at + 1, step + 2
            try:
                with Interrupting(at) as places:
                    manager.save(step, state)
            except KeyboardInterrupt:
                interrupted += 1
            if places.seen < at:
                break
            saver = manager._saver
            assert saver is not None
            assert saver._in_flight is not None
            saver._in_flight.wait_over(timeout_s=20)
            if at % 5 == 0:
                manager.save(step + 1, state).wait(timeout_s=20)
    assert interrupted == at - 1 > 50
