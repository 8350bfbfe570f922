"""What was measured of a case, and whether that is enough."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdpa_rewrite.bench.case import Bar, Case
from sdpa_rewrite.bench.contenders import LARGEST_DIFFERENCE


@dataclass(frozen=True)
class Verdict:
    """A bar, what was measured (None: nothing), and whether it was reached.

    ``asked``: the share of the multiply-add peak that ours would have to reach for a bar on speed.
    """

    bar: str
    measured: float | None
    passed: bool
    asked: float | None = None

    def __str__(self) -> str:
        found = "nothing measured" if self.measured is None else f"{self.measured:.3g}"
        asked = f", which takes {self.asked:.0%} of the peak" if self.asked and not self.passed else ""
        return f"{'pass' if self.passed else 'FAIL'}: {found} ({self.bar}{asked})"


@dataclass(frozen=True)
class Result:
    """``seconds`` and ``memory`` by contender; ``ratios``: how many times as long as ours the others take.

    ``fraction``: of the multiply-add peak that ours reached.  ``missing``: why a contender did not run.
    ``difference``: between the results of ours and stock's, or those in float64 where stock's are far from both.
    ``kernel``: what took the attention in ours, and ``reasons`` why something was left to stock.
    """

    suite: str
    name: str
    form: str
    dtype: str
    training: bool
    length: int
    seconds: Mapping[str, float]
    ratios: Mapping[str, float]
    memory: Mapping[str, int] = field(default_factory=dict)
    fraction: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    kernel: str = ""
    reasons: Sequence[str] = ()
    difference: float = 0.0
    verdicts: Sequence[Verdict] = ()

    @property
    def agrees(self) -> bool:
        """Whether ours computes what stock computes, or what float64 does."""
        return "ours" not in self.missing and self.difference <= LARGEST_DIFFERENCE[self.dtype]

    @property
    def passed(self) -> bool:
        """Whether every bar was reached, by the right results."""
        return self.agrees and all(v.passed for v in self.verdicts)


def judged(result: Result, case: Case) -> Result:
    """The result with a verdict on each bar of its case."""
    return dataclasses.replace(result, verdicts=tuple(_verdict(result, bar) for bar in case.bars))


def _verdict(result: Result, bar: Bar) -> Verdict:
    measured = _measured(result, bar)
    if measured is None:
        return Verdict(str(bar), None, False)
    passed = measured <= bar.bound if bar.quantity == "memory" else measured >= bar.bound
    asked = result.fraction * bar.bound / measured if bar.quantity == "speed" and result.fraction else None
    return Verdict(str(bar), measured, passed, asked)


def _measured(result: Result, bar: Bar) -> float | None:
    if bar.quantity == "speed":
        return result.ratios.get(bar.against)
    if bar.quantity == "peak":
        return result.fraction
    own, other = result.memory.get("ours"), result.memory.get(bar.against)
    return own / other if own is not None and other else None


def to_json(about: Mapping[str, str], results: Sequence[Result]) -> str:
    """All of it."""
    whole: dict[str, Any] = {"about": dict(about), "results": [dataclasses.asdict(r) for r in results]}
    return json.dumps(whole, indent=1)
