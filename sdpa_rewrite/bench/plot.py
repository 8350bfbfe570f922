"""Time and memory against the sequence length, as a picture (the ``plot`` extra)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_rewrite.bench.contenders import NAMES
from sdpa_rewrite.bench.result import Result

Series = dict[str, list[tuple[int, float]]]


def series(results: Sequence[Result], what: str) -> dict[str, Series]:
    """By title and contender: pairs of a length and its ``seconds`` or ``memory``, in order of length."""
    found: dict[str, Series] = defaultdict(lambda: defaultdict(list))
    for r in results:
        title = f"{r.form} {'training' if r.training else 'forward'} {r.dtype}"
        values: Mapping[str, float] = getattr(r, what)
        for name in NAMES:
            if name in values:
                found[title][name].append((r.length, values[name]))
    return {title: {n: sorted(pairs) for n, pairs in by.items()} for title, by in found.items()}


def plot(results: Sequence[Result], path: str, caption: str) -> None:
    """Write a picture: a row for each kind of case, time on the left and memory on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(what, label, factor) for what, label, factor in (("seconds", "ms", 1e3), ("memory", "MiB", 2.0**-20))]
    titles = list(series(results, "seconds"))
    figure, axes = pyplot.subplots(len(titles), 2, figsize=(11, 3.2 * len(titles)), squeeze=False)
    for column, (what, label, factor) in enumerate(panels):
        data = series(results, what)
        for row, title in enumerate(titles):
            _panel(axes[row][column], data.get(title, {}), f"{title}, {label}", factor)
    figure.suptitle(caption, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=120)


def _panel(axis: Any, data: Series, title: str, factor: float) -> None:
    for name, pairs in data.items():
        axis.plot([n for n, _ in pairs], [value * factor for _, value in pairs], marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("sequence length", fontsize=8)
    if data:
        axis.legend(fontsize=7)
