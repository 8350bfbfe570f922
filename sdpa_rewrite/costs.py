"""How long attention takes on CPU, written out and fused: a linear model of measured times.

A time is a sum of what is counted (``Work.counts``), each count times a cost.  The costs were measured by
``python -m sdpa_rewrite calibrate`` and are in ``costs.json``, by instruction set, type, direction and kind of code;
``config.costs`` names a file of one's own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdpa_rewrite import config
from sdpa_rewrite.algebra.axes import product
from sdpa_rewrite.algebra.hints import Hints, estimated, hints_of, long
from sdpa_rewrite.algebra.term import subterms
from sdpa_rewrite.emit.base import compute_dtype, device_of
from sdpa_rewrite.emit.programs import drawn
from sdpa_rewrite.emit.visible import visibility
from sdpa_rewrite.processor import INTEL, instruction_set
from sdpa_rewrite.site import Site

SHIPPED = Path(__file__).with_name("costs.json")
UNFUSED = "stock"
COUNTS = ("calls", "heads", "products", "scores", "operands", "draws")
TOLERATED = 1.05
"""What is fused may be estimated to take this many times as long: it takes less memory."""
FAR = 2_200_000
"""Elements of keys and values of the largest samples: what is more may lie far, at costs that were not measured."""

Costs = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]]
"""Instruction set, type, direction and kind of code -> nanoseconds of one thread for one of each of ``COUNTS``."""


@dataclass(frozen=True)
class Work:
    """What there is to do: ``heads`` times ``rows`` x ``columns`` scores, for ``shared`` heads of keys and values.

    ``depth``: head size of keys and of values together.  ``seen``: the share of the scores that no mask hides.
    """

    dtype: str
    training: bool
    heads: int
    shared: int
    rows: int
    columns: int
    depth: int
    seen: float = 1.0
    draws: bool = False

    def counts(self, fused: bool) -> tuple[float, ...]:
        """``COUNTS``: only fused code skips what is hidden."""
        scores = self.heads * self.rows * self.columns
        some = scores * self.seen if fused else scores
        operands = self.shared * self.columns * self.depth
        return 1.0, self.heads, some * self.depth, some, operands, some * self.draws


def estimate(work: Work, kind: str) -> float | None:
    """Seconds, with the threads that torch has now; None where nothing was measured that is like it."""
    own = _costs(work.dtype).get("training" if work.training else "forward", {}).get(kind)
    repeated = kind == UNFUSED and work.shared < work.heads  # in memory, which was not measured either
    if own is None or repeated or work.shared * work.columns * work.depth > FAR:
        return None
    calls, *rest = (c * n for c, n in zip(own, work.counts(kind != UNFUSED), strict=True))
    return (calls + sum(rest) / torch.get_num_threads()) * 1e-9


def _costs(dtype: str) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Those of the CPU's instruction set, or of another of the same maker, or of any; empty where there are none."""
    table, wanted = _table(), instruction_set()
    alike = [name for name in table if name.endswith(INTEL) == wanted.endswith(INTEL)]
    measured = (table[name].get(dtype) for name in (wanted, *alike, *table) if name in table)
    return next((found for found in measured if found), {})


def is_slower(own: float, today: float) -> bool:
    """Whether code that takes ``own`` seconds should not replace code that takes ``today``."""
    return own > TOLERATED * today


def work_of(site: Site) -> Work | None:
    """What there is to do at a site; None where it is not on CPU.

    Symbolic sizes are those of the first inputs, symbolic lengths at least ``hints.LONG``.
    """
    if device_of(site).type != "cpu":
        return None
    lengths = product(site.rows), product(site.columns)
    known = long(hints_of(o.node.meta["val"] for o in (site.query, site.key, site.value)), lengths)
    rows, columns = (estimated(n, known) for n in lengths)
    shared = [a.size for a in site.batch if a in site.key.axes or a in site.value.axes]
    return Work(
        dtype=str(compute_dtype(site)).removeprefix("torch."),
        training=site.training,
        heads=estimated(math.prod(a.size for a in site.batch), known),
        shared=estimated(math.prod(shared), known),
        rows=rows,
        columns=columns,
        depth=estimated(product(site.depth) + product(site.width), known),
        seen=_seen(site, rows, columns, known),
        draws=any(drawn(c) is not None for c in site.captures if _reads(site, c.name)),
    )


def _reads(site: Site, name: str) -> bool:
    return any(t.op == "hole" and t.attr == name for t in subterms(site.weight))


def _seen(site: Site, rows: int, columns: int, known: Hints) -> float:
    """The share of the scores within the band that masks by index leave; masks that are tensors may hide nothing."""
    band = visibility(site, site.score, frozenset())
    if not rows or not columns or (band.low is None and band.high is None):
        return 1.0
    low = -rows if band.low is None else estimated(band.low, known)
    high = columns if band.high is None else estimated(band.high, known)
    some = range(0, rows, max(1, rows // 256))
    inside = (min(columns - 1, i + high) - max(0, i + low) + 1 for i in some)
    return sum(max(0, n) for n in inside) / (len(some) * columns)


def key() -> tuple[Any, ...]:
    """What identifies the estimates: part of the key of Inductor's caches."""
    return instruction_set(), torch.get_num_threads(), repr(_table())


def _table() -> Costs:
    path = Path(config.costs or SHIPPED)
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(path: Path, written: int) -> Costs:
    """The file as it was ``written`` last: it may be calibrated again while the process runs."""
    found: Costs = json.loads(path.read_text())
    return found
