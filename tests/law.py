"""The law in full: every form in every case, and twenty near misses of each.  ``python -m tests.law [NAME ...]``"""

from __future__ import annotations

import sys
import time

from sdpa_rewrite import patterns
from sdpa_rewrite.testing import cases, check_pattern


def main(names: list[str]) -> int:
    """Check the patterns of these names (all, if none is given); the number that failed."""
    failed = 0
    for pattern in sorted(patterns.active(), key=lambda p: p.name):
        if names and pattern.name not in names:
            continue
        start = time.perf_counter()
        try:
            done = check_pattern(pattern, cases=list(cases()), near_misses=20)
            text = f"holds in {done.cases} cases, {done.near_misses} near misses by mutation, {done.declared} declared"
            if done.near_misses < 20:
                text, failed = f"too few near misses: {text}", failed + 1
        except AssertionError as error:
            text, failed = str(error), failed + 1
        print(f"{pattern.name} ({time.perf_counter() - start:.0f} s): {text}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
