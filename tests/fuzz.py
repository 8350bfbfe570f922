"""Draw attention programs, compile them and compare with eager: ``python -m tests.fuzz --programs 2000 --seed 0``."""

from __future__ import annotations

import argparse
import functools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from tests import programs
from tests.harness import Verdict, judge
from tests.near_misses import NEAR_MISSES, judge_near_miss
from tests.programs import Program


def simplest(program: Program, verdict: Verdict, judge: Callable[[Program], Verdict]) -> tuple[Program, Verdict]:
    """A program with as few unusual fields as possible that is still wrong."""
    while True:
        for simpler in program.simpler():
            found = judge(simpler)
            if found.wrong:
                program, verdict = simpler, found
                break
        else:
            return program, verdict


def main() -> int:
    """Run; the exit code is the number of wrong programs, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--near-misses", action="store_true", help="programs that are something else")
    parser.add_argument("--reasons", action="store_true", help="also count why programs were not fused")
    parser.add_argument("--keep-going", type=int, default=20, help="stop after this many wrong programs")
    options = parser.parse_args()
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    source = random.Random(options.seed)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    start, worst = time.time(), 0.0
    while counts["drawn"] < options.programs and counts["wrong"] < options.keep_going:
        program = programs.draw(source)
        near = source.choice(sorted(NEAR_MISSES)) if options.near_misses else ""
        judge_one = functools.partial(judge_near_miss, name=near) if near else judge
        verdict = judge_one(program)
        if verdict.status == "invalid":
            counts["invalid"] += 1
            continue
        counts["drawn"] += 1
        counts[verdict.status] += 1
        worst = max(worst, verdict.ratio)
        reasons.update({f"{o.status}: {r.text}" for o in verdict.outcomes for r in o.reasons})
        if verdict.status == "missed" and not verdict.outcomes:
            reasons["missed: no candidate"] += 1
        if verdict.wrong:
            counts["wrong"] += 1
            program, verdict = simplest(program, verdict, judge_one)
            print(f"WRONG {near} {program.describe()}\n    {verdict.wrong}", flush=True)
        if counts["drawn"] % 50 == 0:
            print(f"... {dict(counts)} worst error {worst:.2f} of the allowed, {time.time() - start:.0f} s", flush=True)
    if options.reasons:
        for text, n in reasons.most_common():
            print(f"{n:6d} {text}")
    line = ", ".join(
        f"{counts[name]} {name}" for name in ("drawn", "fused", "recognised", "missed", "wrong", "invalid")
    )
    print(f"{line}; seed {options.seed}, {time.time() - start:.0f} s")
    return min(100, counts["wrong"])


if __name__ == "__main__":
    sys.exit(main())
