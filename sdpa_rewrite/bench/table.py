"""Results as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdpa_rewrite.bench.contenders import NAMES
from sdpa_rewrite.bench.result import Result

RIVALS = tuple(n for n in NAMES if n != "ours")


def header(about: Mapping[str, str]) -> str:
    """On what, and by what command."""
    width = max(map(len, about))
    return "\n".join(f"{name:{width}}  {value}" for name, value in about.items())


def legend() -> str:
    """What the columns are."""
    width = max(map(len, NAMES))
    lines = [f"{name:{width}}  {text}" for name, text in NAMES.items()]
    return "\n".join(
        [*lines, "times: medians of interleaved runs; x: times as fast, the median of the ratios by round"]
    )


def table(results: Sequence[Result]) -> str:
    """A suite's results: a line for each case, and its verdicts below it."""
    columns = ["case", *(f"{n} ms" for n in NAMES), *(f"x {n}" for n in RIVALS)]
    columns += [*(f"{n} MiB" for n in ("stock", "sdpa", "ours")), "peak", "by"]
    rows = [_cells(r) for r in results]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [_line(columns, widths)]
    for result, cells in zip(results, rows, strict=True):
        lines.append(_line(cells, widths))
        lines += [f"    {verdict}" for verdict in result.verdicts]
        lines += [f"    left: {reason}" for reason in result.reasons]
        if "ours" in result.missing:
            lines.append("    FAIL: ours did not run")
        elif not result.agrees:
            lines.append(f"    FAIL: results differ from stock's by {result.difference:.1e} of the largest value")
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (f"{c:{w}}" if k == 0 else f"{c:>{w}}" for k, (c, w) in enumerate(zip(cells, widths, strict=True)))
    return "  ".join([first, *rest]).rstrip()


def _cells(result: Result) -> list[str]:
    cells = [result.name]
    cells += [_number(result.seconds.get(n), 1e3) for n in NAMES]
    cells += [_number(result.ratios.get(n), 1.0) for n in RIVALS]
    cells += [_number(result.memory.get(n), 2.0**-20) for n in ("stock", "sdpa", "ours")]
    cells.append("-" if result.fraction is None else f"{result.fraction:.0%}")
    cells.append(result.kernel)
    return cells


def _number(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    number = value * factor
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def missing(results: Sequence[Result]) -> str:
    """Why contenders did not run, each reason once."""
    reasons = {f"{name}: {why}" for r in results for name, why in r.missing.items()}
    return "\n".join(f"not run: {reason}" for reason in sorted(reasons))


def summary(results: Sequence[Result]) -> str:
    """How many bars were reached."""
    verdicts = [v for r in results for v in r.verdicts]
    wrong = sum(not r.agrees for r in results)
    text = f"{sum(v.passed for v in verdicts)} of {len(verdicts)} bars reached" if verdicts else "no bars here"
    return f"{text}; {wrong} cases with wrong results or none" if wrong else text
