"""What becomes of a function, asserted and recorded."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdpa_rewrite import graph_pass, report
from sdpa_rewrite.authoring import registry, stage
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.outcome import Outcome
from sdpa_rewrite.report import Report
from sdpa_rewrite.testing.running import compiled, difference, exactly, run


def assert_rewrites(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    times: int = 1,
    by: str = "",
    patterns: Sequence[Pattern] = (),
    dynamic: bool = False,
) -> Report:
    """``fn(*args)`` is rewritten ``times`` times, and computes what it did, forward and backward.

    ``by``: the pattern or emitter that is counted; all, if empty.  ``patterns``: these are on, besides those that are.
    Raises ``AssertionError`` with the whole report.
    """
    told = compare(fn, args, patterns=patterns, dynamic=dynamic)
    done = _rewritten(told, by)
    if len(done) != times:
        raise AssertionError(f"rewritten {len(done)} times{f' by {by}' if by else ''}, not {times}\n{told}")
    return told


def assert_misses(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    reason: str = "",
    by: str = "",
    patterns: Sequence[Pattern] = (),
    dynamic: bool = False,
) -> Report:
    """``fn(*args)`` is not rewritten, for a reason that contains ``reason``, and computes what it did.

    ``by``: the pattern or emitter that must not; what a pattern leaves alone another may take.
    """
    told = compare(fn, args, patterns=patterns, dynamic=dynamic)
    done = _rewritten(told, by)
    reasons = [r for o in told.sites for r in reasons_of(o)]
    if done or (reason and not any(reason in r for r in reasons)):
        raise AssertionError(f"{'rewritten' if done else f'no reason has {reason!r}'}\n{told}")
    return told


def _rewritten(told: Report, by: str) -> list[Outcome]:
    """The places that were rewritten, by a pattern or emitter if one is named."""
    return [o for o in told.sites if o.status == "fused" and by in ("", o.emitter, o.emitter.removeprefix("pattern "))]


def compare(
    fn: Callable[..., Any], args: Sequence[Any], *, patterns: Sequence[Pattern] = (), dynamic: bool = False
) -> Report:
    """Compile ``fn``, run it on ``args`` forward and backward, and compare with eager.  What became of it.

    ``fn``: a function of tensors, or a module, whose parameters get gradients as those ``args`` do that require one.
    Raises ``AssertionError`` where they differ by more than rounding.
    """
    with registry.scope(*patterns), report.collect() as collected, warnings.catch_warnings(), _thorough():
        warnings.simplefilter("ignore")
        ours = run(compiled(fn, dynamic), args)
    eager = run(fn, args)
    wrong = difference(ours, eager, exactly(fn, args, eager))
    if wrong:
        raise AssertionError(f"{wrong}\n{Report(tuple(collected.sites), tuple(collected.failures))}")
    return Report(tuple(collected.sites), tuple(collected.failures), collected.graphs)


@contextlib.contextmanager
def _thorough() -> Iterator[None]:
    """Somebody reads the diagnosis of what is compiled in the block, as in ``explain``."""
    token = stage.thorough.set(True)
    try:
        yield
    finally:
        stage.thorough.reset(token)


@dataclass
class Recorded:
    """Graphs as text: ``before`` and ``after`` our pass, in the order of compilation."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@contextlib.contextmanager
def record_graphs() -> Iterator[Recorded]:
    """Record each graph that our pass sees in the block, before and after."""
    recorded = Recorded()
    with graph_pass.watched(lambda g: recorded.before.append(str(g)), lambda g: recorded.after.append(str(g))):
        yield recorded


def reasons_of(outcome: Outcome) -> Iterator[str]:
    """Why an outcome is no better: the patterns' reasons first."""
    yield from (str(outcome.details[k]) for k in ("pattern says", "nearest pattern") if k in outcome.details)
    yield from map(str, outcome.reasons)
