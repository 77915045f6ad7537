"""Play random histories: ``python -m tests.nodes.campaign --histories 300 --seed 7``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from tests.nodes.campaign.histories import _way, environment, history, in_words, play, shortened


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nodes.campaign", description=__doc__)
    parser.add_argument("--histories", type=int, default=300, help="how many (default: 300)")
    parser.add_argument(
        "--seed", type=int, help="the first history (default: drawn); one history is repeated by its own"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other after this time")
    parser.add_argument("--shorten", action="store_true", help="leave out of a failing history what it fails without")
    parser.add_argument("--tell", action="store_true", help="also what happened in histories that went well")
    parser.add_argument("--stop", action="store_true", help="end with the first failure")
    given = parser.parse_args()
    first = given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000)
    verdicts, rules, began, jobs, saves, staged = Counter[str](), Counter[str](), time.monotonic(), 0, 0, 0
    with environment() as server:
        for seed in range(first, first + given.histories):
            if time.monotonic() - began > given.seconds:
                break
            steps = history(seed)
            played = play(seed, steps, server)
            verdicts[played.verdict] += 1
            rules += played.rules
            jobs, saves, staged = jobs + played.jobs, saves + played.saves, staged + played.staged
            print(
                f"history {seed}: {played.verdict}, {played.jobs} jobs, {played.saves} saves, {played.took_s:.1f} s",
                flush=True,
            )
            if played.verdict == "ok":
                print("\n".join(played.told) if given.tell else "", end="\n" if given.tell else "", flush=True)
                continue
            if given.shorten:
                steps = shortened(seed, steps, server, _way(played))
            print(in_words(seed, played, steps), flush=True)
            if given.stop:
                break
    took = time.monotonic() - began
    print(f"{verdicts.total()} histories from seed {first} in {took:.0f} s: {dict(verdicts)}")
    print(f"{jobs} jobs, {saves} saves, {staged} copies staged; {dict(rules)}")
    return 0 if set(verdicts) <= {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
