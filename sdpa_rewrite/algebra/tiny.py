"""Tiny random worlds: where two terms are compared.

A neighbourhood has no sizes in it, so it may be evaluated on an instance of a few positions per axis, in
float64, whatever the real sizes are.  Two terms that agree on generic random data are the same function but for
a chance of measure zero; special values and the two sides of every comparison are drawn on purpose.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import Atom, Size
from sdpa_rewrite.algebra.interpret import World, evaluate
from sdpa_rewrite.algebra.term import Term, subterms

SIZES = (2, 3, 5, 4)
COMPARISONS = frozenset({"eq", "ne", "lt", "le"})
INFINITY = float("inf")


class Inconsistent(Exception):
    """The sizes of a neighbourhood cannot all be made small at once."""


class TinySizes:
    """A small size for every size that occurs, the same wherever it occurs."""

    def __init__(
        self, atoms: Iterable[Atom], joins: Iterable[tuple[Atom, Sequence[Atom | None]]], turn: int = 0
    ) -> None:
        self._sizes: dict[Size, int] = {}
        totals = {a.size: pieces for a, pieces in joins}
        for atom in sorted(atoms, key=lambda a: a.name):
            if atom.size not in totals:
                self._sizes.setdefault(atom.size, SIZES[(len(self._sizes) + turn) % len(SIZES)])
        for _ in range(len(totals)):  # a concatenation may be a piece of another
            for size, pieces in totals.items():
                if all(p is None or p.size in self._sizes for p in pieces):
                    total = sum(self.of(p.size) if p is not None else 1 for p in pieces)
                    if self._sizes.setdefault(size, total) != total:
                        raise Inconsistent(f"an axis of {size} is concatenated in two ways")

    def of(self, size: Size) -> int:
        """The small size.  Raises ``Inconsistent``."""
        try:
            return self._sizes[size]
        except KeyError:
            raise Inconsistent(f"an axis of {size} is unknown") from None


class TinyWorld(World):
    """One random draw.

    ``special``: bias-like leaves also hold -inf and finite minima, whole rows of them.  ``generic``: leaves that are
    operands of contractions and never hold special values.  ``columns``: the axes of the keys, along which masks
    are made to cover whole rows.  ``scales``: each value of a tensor is multiplied by one of these (by 1, if none).
    """

    def __init__(
        self,
        terms: Sequence[Term],
        columns: Sequence[Atom],
        generic: set[Any],
        seed: int,
        special: bool,
        scales: Sequence[float] = (),
    ) -> None:
        found = {t for term in terms for t in subterms(term)}
        atoms = {a for t in found for a in _atoms(t)}
        joins = [t.attr for t in found if t.op == "cat"]
        self.sizes = TinySizes(atoms, joins, turn=seed)
        super().__init__(sorted(atoms, key=lambda a: a.name))
        self.columns, self.generic = tuple(columns), generic
        self.seed, self.special, self.scales = seed, special, tuple(scales)
        self.random = torch.Generator().manual_seed(seed)
        self.pools = _pools(found)
        self.symbols: dict[sympy.Symbol, int] = {}
        self._leaves: dict[Any, Tensor] = {}
        self._positions: dict[Atom, Tensor] = {}

    def size(self, atom: Atom) -> int:
        """See ``World``."""
        return self.sizes.of(atom.size)

    def offset(self, size: Size) -> int:
        """See ``World``."""
        return 0 if size == 0 else self.sizes.of(size) if size != 1 else 1

    def number(self, value: Any) -> Tensor:
        """See ``World``."""
        if isinstance(value, sympy.Basic):
            value = self.concrete(value)
        if isinstance(value, bool):
            return torch.tensor(value)
        return torch.tensor(float(value), dtype=torch.float64)

    def concrete(self, expr: sympy.Basic) -> float:
        """A symbolic number, each symbol with a value of its own."""
        values = {s: self._symbol(s) for s in sorted(expr.free_symbols, key=str)}
        done = expr.xreplace(values)
        try:
            return float(done)
        except TypeError:
            return float(sympy.N(done))

    def _symbol(self, symbol: sympy.Symbol) -> Any:
        if symbol not in self.symbols:
            value = 7 + 2 * len(self.symbols) + zlib.crc32(str(symbol).encode()) % 11
            self.symbols[symbol] = sympy.Integer(value) if symbol.is_integer else sympy.Float(value / 16)
        return self.symbols[symbol]

    def index(self, term: Term) -> Tensor:
        """See ``World``."""
        dim, start, step = term.attr
        value = torch.zeros(1, dtype=torch.float64)
        for atom in dim:
            reach = self._reach(atom.size)
            value = (value[:, None] * reach + self._sample(atom, reach)[None, :]).reshape(-1)
        return value * self._concrete_size(step) + self._concrete_size(start)

    def _concrete_size(self, size: Size) -> float:
        return float(size) if isinstance(size, int) else self.concrete(size)

    def _reach(self, size: Size) -> int:
        return max(1, int(self._concrete_size(size)))

    def _sample(self, atom: Atom, reach: int) -> Tensor:
        """Sorted positions of the real axis.  Axes draw from one small pool, so that equal positions occur."""
        if atom not in self._positions:
            pool_random = torch.Generator().manual_seed(self.seed)
            pool = torch.randint(0, 1 << 30, (5,), generator=pool_random) % reach
            pool = torch.cat([pool, (pool[:2] + 1) % reach, torch.tensor([0, reach - 1])])
            n = self.size(atom)
            order = torch.randperm(max(n, len(pool)), generator=self.random) % len(pool)
            picked = pool[order[:n]]
            self._positions[atom] = picked.sort().values.to(torch.float64)
        return self._positions[atom]

    def leaf(self, term: Term) -> Tensor:
        """See ``World``."""
        node, dims = term.attr
        if node not in self._leaves:
            shape = [self.extent(d) for d in dims]
            rows = [k for k, d in enumerate(dims) if set(d) & set(self.columns)]
            self._leaves[node] = self._draw(node, shape, rows)
        value = self._leaves[node]
        if list(value.shape) != [self.extent(d) for d in dims]:
            raise Inconsistent(f"{node.name} is read in two shapes")
        return value

    def force(self, term: Term) -> None:
        """Give a condition (a comparison, a maximum, a minimum) random outcomes."""
        shape = [self.size(a) if a in term.axes else 1 for a in self.order]
        outcome = torch.rand(shape, generator=self.random) < 0.5
        if term.op not in COMPARISONS:
            first, second = (evaluate(a, self) for a in term.args)
            outcome = torch.where(outcome, first, second)
        self.values[term] = outcome

    def extreme(self, scores: Term, constants: Sequence[float]) -> Tensor:
        """Values for the scores of every magnitude, some of them (and a whole row) minus infinity."""
        shape = [self.size(a) if a in scores.axes else 1 for a in self.order]
        scales = torch.tensor([1.0, *(4 * c for c in constants), *(64 * c for c in constants)], dtype=torch.float64)
        scale = scales[torch.randint(len(scales), shape, generator=self.random)]
        value = torch.randn(shape, generator=self.random, dtype=torch.float64) * scale
        value = torch.where(torch.rand(shape, generator=self.random) < 0.15, -INFINITY, value)
        return self._rows(value, [self.position[a] for a in self.columns], -INFINITY, None)

    def _draw(self, node: Any, shape: list[int], columns: list[int]) -> Tensor:
        dtype = node.meta["val"].dtype
        pool = self.pools.get(node)
        if dtype == torch.bool:
            return self._rows(torch.rand(shape, generator=self.random) < 0.5, columns, True, False)
        if pool or not dtype.is_floating_point:
            values = torch.tensor(sorted(pool or {0.0, 1.0}), dtype=torch.float64)
            picked = values[torch.randint(len(values), shape, generator=self.random)]
            picked = self._rows(picked, columns, values[0], values[-1])
            return picked if dtype.is_floating_point else picked.to(torch.int64)
        value = torch.randn(shape, generator=self.random, dtype=torch.float64)
        if self.scales:
            scales = torch.tensor(self.scales, dtype=torch.float64)
            value = value * scales[torch.randint(len(scales), shape, generator=self.random)]
        if self.special and node not in self.generic and columns:
            fill = -INFINITY if self.seed % 2 else -3.4028234663852886e38
            value = torch.where(torch.rand(shape, generator=self.random) < 0.3, fill, value)
            value = self._rows(value, columns, fill, None)
        return value

    def _rows(self, value: Tensor, columns: list[int], first: Any, last: Any) -> Tensor:
        """The first row filled with ``first``, the last with ``last``: rows that are masked as a whole."""
        if not columns or value.dim() == 0 or 0 in value.shape:
            return value
        order = [k for k in range(value.dim()) if k not in columns] + columns
        rows = value.permute(order).clone(memory_format=torch.contiguous_format)
        flat = rows.view(math.prod(rows.shape[: len(order) - len(columns)]), -1)
        if self.special and len(flat) > 1:
            flat[0] = first
            if last is not None:
                flat[-1] = last
        elif self.special and self.seed % 3 == 0:
            flat[0] = first
        return rows.permute([order.index(k) for k in range(value.dim())])


def can_shrink(terms: Sequence[Term]) -> bool:
    """Whether all axes of ``terms`` can have small sizes at once."""
    found = {t for term in terms for t in subterms(term)}
    atoms = {a for t in found for a in _atoms(t)}
    try:
        sizes = TinySizes(atoms, [t.attr for t in found if t.op == "cat"])
        for atom in atoms:
            sizes.of(atom.size)
    except Inconsistent:
        return False
    return True


def _atoms(term: Term) -> set[Atom]:
    out = set(term.axes)
    if term.op == "reduce":
        out |= set(term.attr[1])
    if term.op == "part":
        out |= {term.attr[0]}
    if term.op == "cat":
        out |= {term.attr[0], *(p for p in term.attr[1] if p is not None)}
    return out


def _pools(found: set[Term]) -> dict[Any, set[float]]:
    """For every leaf that is compared with numbers: values on both sides of each number, and the number itself."""
    pools: dict[Any, set[float]] = {}
    for term in found:
        if term.op not in COMPARISONS:
            continue
        for x, y in (term.args, term.args[::-1]):
            leaf = x.args[0] if x.op in ("float", "int", "bool") else x
            if leaf.op == "leaf" and y.op == "number" and isinstance(y.attr, (int, float)) and math.isfinite(y.attr):
                step = 1.0 if not leaf.attr[0].meta["val"].dtype.is_floating_point else max(abs(y.attr) / 2, 0.25)
                pools.setdefault(leaf.attr[0], set()).update({y.attr - step, float(y.attr), y.attr + step})
    return pools


def agree(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> float | None:
    """None when equal but for rounding (NaN and infinities in the same places), else the largest difference."""
    a, b = torch.broadcast_tensors(a.to(torch.float64), b.to(torch.float64))
    if torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isposinf(), b.isposinf()):
        finite = a.isfinite() & b.isfinite()
        if torch.equal(a.isneginf(), b.isneginf()):
            difference = torch.where(finite, a - b, 0.0).abs()
            size = torch.where(finite, a, 0.0).abs()
            worst = float(difference.max()) if difference.numel() else 0.0
            scale = float(size.max()) if size.numel() else 0.0
            return None if worst <= tolerance * (1.0 + scale) else worst
    return INFINITY


__all__ = ["COMPARISONS", "Inconsistent", "TinySizes", "TinyWorld", "agree", "can_shrink"]
