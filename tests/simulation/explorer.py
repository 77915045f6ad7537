"""Explorer: every history of a small world, shortest first, until a number of states was seen; and long random ones.

Rules:
* The order is always the same, and no clock has a say: the same world gives the same report.
* A failure comes with one of the shortest histories that lead to it, as sentences.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from tests.simulation.small_histories import Histories
from tests.simulation.small_world import State, Step, World

__all__ = ["Report", "explore", "wander"]


@dataclass
class Report:
    """What was seen.

    Attributes:
        states: How many different ones.
        steps: The length of the longest history.
        complete: Whether that was all of them.
        wrong: One history for each thing that is wrong.
    """

    states: int = 0
    steps: int = 0
    complete: bool = False
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def told(self) -> str:
        """What is wrong, each with its history."""
        return "\n".join(f"{what}:\n  " + "\n  ".join(history) for what, history in self.wrong.items())


def explore(world: World, limit: int, *, stop_at_first: bool = False) -> Report:
    """Visit states, those of the shortest histories first.

    Args:
        limit: Of how many states the steps are taken.
        stop_at_first: Whether to end with the first thing that is wrong.
    """
    histories = Histories(world)
    beginning = histories.beginning()
    came_by: dict[State, tuple[State, str] | None] = {beginning: None}
    length = {beginning: 0}
    waiting = deque([beginning])
    report = Report()

    def is_wrong(what: str, state: State, last: str = "") -> None:
        if what and what not in report.wrong:
            report.wrong[what] = _told(came_by, state) + ([last] if last else [])

    for _ in range(limit):
        if not waiting or (stop_at_first and report.wrong):
            break
        state = waiting.popleft()
        report.states += 1
        report.steps = length[state]
        is_wrong(histories.wrong_at_rest(state), state)
        for step in histories.steps(state):
            is_wrong(step.wrong, state, step.what)
            if step.after not in came_by:
                came_by[step.after] = (state, step.what)
                length[step.after] = length[state] + 1
                waiting.append(step.after)
    report.complete = not waiting
    return report


def wander(world: World, histories: int, steps: int, seed: int) -> Report:
    """Follow random histories, each until it has so many steps, and then let everybody come to rest.

    Args:
        histories: How many.
        steps: The length of each.
        seed: The same number gives the same histories.
    """
    found = Histories(world)
    report = Report(steps=steps, complete=True)
    for number in range(histories):
        draw = random.Random(f"{seed} {number}")
        state, told = found.beginning(), []
        for _ in range(steps):
            report.states += 1
            kinds: dict[str, list[Step]] = {}
            for step in found.steps(state):
                kinds.setdefault(step.what.lstrip("0123456789 ").split(" ")[0], []).append(step)
            if not kinds:
                break
            step = draw.choice(draw.choice(list(kinds.values())))
            told.append(step.what)
            state = step.after
            wrong = step.wrong or found.wrong_at_rest(state._replace(actors=()))
            if wrong:
                report.wrong.setdefault(wrong, told)
                break
    return report


def _told(came_by: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    told = []
    while (before := came_by[state]) is not None:
        state, what = before
        told.append(what)
    return told[::-1]
