"""Attention drawn by hypothesis, compiled and compared with eager; ``tests.fuzz`` draws thousands."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.harness import judge
from tests.near_misses import NEAR_MISSES, judge_near_miss
from tests.programs import CHOICES, Program

PROGRAMS = 30
MISSES = 20
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,  # CI draws the same programs each time; the command draws others
    "database": None,
    "phases": [Phase.explicit, Phase.generate],  # a failing program is made simpler by `tests.fuzz`
    "suppress_health_check": list(HealthCheck),
}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A plain program with some fields moved."""
    names = draw(st.lists(st.sampled_from(sorted(CHOICES)), unique=True, min_size=3, max_size=9))
    return Program(**{n: draw(st.sampled_from(CHOICES[n])) for n in names}, seed=draw(st.integers(0, 1 << 16)))


def test_compiled_is_eager() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=PROGRAMS, **SETTINGS)
    @given(programs())
    def check(program: Program) -> None:
        torch._dynamo.reset()
        verdict = judge(program)
        counts[verdict.status] += 1
        assert not verdict.wrong, f"{program.describe()}: {verdict.wrong}"

    check()
    judged = counts["fused"] + counts["recognised"] + counts["missed"]
    assert judged >= PROGRAMS // 2, counts
    assert counts["fused"] >= judged // 4, counts  # else the comparison would say little


def test_a_near_miss_is_left_alone() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=MISSES, **SETTINGS)
    @given(programs(), st.sampled_from(sorted(NEAR_MISSES)))
    def check(program: Program, name: str) -> None:
        verdict = judge_near_miss(program, name)
        counts[verdict.status] += 1
        assert not verdict.wrong, f"{name} in {program.describe()}: {verdict.wrong}"

    check()
    assert counts["missed"] + counts["recognised"] + counts["fused"] >= MISSES // 2, counts


def test_a_pointwise_near_miss_is_fused_as_what_it_is() -> None:
    """Found by the command: with a safe softmax, FlexAttention takes the square of the scores, which is right."""
    verdict = judge_near_miss(Program(scale="per_row", softmax="safe", seed=8132), "scores squared")
    assert not verdict.wrong
    assert [o.emitter for o in verdict.outcomes] != ["sdpa"]
