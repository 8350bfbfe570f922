"""A graph read lazily: one operator at a time, as far as a pattern asks.

The graph and the pattern's own trace are both read by this, so that what one spelling becomes, the other does too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dims, Irregular, Refine, Window, atoms_of, same_size, shape_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.lift.layout import pull
from sdpa_rewrite.lift.lifter import Axes, CannotWindow, Lifter
from sdpa_rewrite.lift.ops import (
    CASTS,
    LAYOUT,
    NUMBERS,
    SOFTMAXES,
    argument,
    is_call,
    is_tensor,
    opname,
    value_of,
)
from sdpa_rewrite.lift.reductions import reduced_dims


class Everything(set[Node]):
    """The interior of a graph that is opened wherever a pattern asks."""

    def __contains__(self, node: object) -> bool:
        return True


class Again(Exception):
    """An axis was split: what was read so far has to be read again."""


@dataclass(frozen=True)
class Softmax:
    """``softmax(logits)`` over ``axes``; ``safe``: a row that is -inf as a whole is 0."""

    logits: Term
    axes: frozenset[Atom]
    safe: bool


class Opener(Lifter):
    """Opens terms of one graph.  What an operator reads stays closed until it is asked for."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, Everything())
        self._numbers = Lifter(axes, set())
        self._numbers.terms = self.terms
        self._opened: dict[Term, Term] = {}
        self._softmaxes: dict[Term, Softmax | None] = {}
        self._inside: dict[Term, dict[Node, None]] = {}

    def request(self, node: Node, dims: Dims) -> Term:
        """``node`` as a closed term, layout and casts looked through; numbers are numbers."""
        while is_call(node):
            name = opname(node)
            if name in LAYOUT:
                try:
                    dims = pull(node, dims)
                except Irregular:
                    break
            elif not (name in CASTS and _floats(node)) and not (name == "slice" and _whole(node)):
                break
            node = node.args[0]  # type: ignore[assignment]
        if is_call(node) and not atoms_of(dims) and (opname(node) in NUMBERS or value_of(node).dim() == 0):
            term = self._numbers.request(node, dims)
            if term.op == "number":
                return term
        if is_call(node) and opname(node) in NUMBERS:
            lifted = self._open(node, opname(node), dims)
            if lifted is not None:
                return lifted
        return self.leaf(node, dims)

    def operand(self, node: Node, dims: Dims) -> Term:
        """See ``request``."""
        return self.request(node, dims)

    def open(self, term: Term) -> Term:
        """``term`` with its outermost operator opened; itself where there is none, or where it cannot be read."""
        if term.op != "leaf":
            return term
        known = self._opened.get(term)
        if known is None:
            known = self._read(term)
            if known.op == "leaf" and known is not term:  # x * 1, x + 0
                known = self.open(known)
            self._opened[term] = known
            self.note_parts(known, term.attr[0])
        return known

    def note_parts(self, opened: Term, node: Node) -> None:
        """Let the parts of an opened operator, as far as no node holds them, be told by the operator's node."""
        for part in subterms(opened):
            if part.op != "leaf":
                self._inside.setdefault(part, {})[node] = None

    def nodes_of(self, term: Term) -> tuple[Node, ...]:
        """The node that ``term`` is, or those that it is a part of."""
        return (term.attr[0],) if term.op == "leaf" else tuple(self._inside.get(term, ()))

    def _read(self, term: Term) -> Term:
        node, dims = term.attr
        if not is_call(node) or any(isinstance(a, Window) for a in atoms_of(dims)):
            return term
        try:
            return self._open(node, opname(node), dims) or term
        except (Irregular, CannotWindow):
            return term
        except Refine as refine:
            self.split(refine)
            raise Again from refine

    def opened(self) -> Iterator[Term]:
        """All terms that were asked to be opened."""
        return iter(self._opened)

    def split(self, refine: Refine) -> None:
        """Split an axis, and forget what was read with it.  Raises ``Irregular``."""
        self.axes.split(refine)
        self._opened.clear()
        self._softmaxes.clear()

    def whole(self, term: Term) -> Term:
        """``term`` with all its pointwise operators opened, as far as they can be read."""
        if term.op != "leaf" or any(isinstance(a, Window) for a in atoms_of(term.attr[1])):
            return term
        try:
            return self._numbers.request(*term.attr)
        except (Irregular, CannotWindow):
            return term
        except Refine as refine:
            self.split(refine)
            raise Again from refine

    # -- what several operators make together ---------------------------------------------------------------

    def softmax(self, term: Term) -> Softmax | None:
        """The softmax that ``term`` is, however it is spelled, if it is one."""
        if term.op != "leaf" or not is_call(term.attr[0]):
            return None
        if term not in self._softmaxes:
            self._softmaxes[term] = self._softmax(term)
        return self._softmaxes[term]

    def _softmax(self, term: Term) -> Softmax | None:
        node, dims = term.attr
        name = opname(node)
        if name in ("mul", "add", "sub", "div"):
            read = self._read(term)
            if read.op == "leaf" and read is not term:  # x * 1, x + 0
                return self.softmax(read)
        if name in SOFTMAXES and name != "_log_softmax":
            k: Any = argument(node, 1, "dim")
            over = frozenset(dims[k % len(dims)])
            return Softmax(self.request(node.args[0], dims), over, name == "_safe_softmax")
        try:
            opened = self.open(term)
            if opened.op == "where":
                return self._safe(opened)
            if opened.op == "div":
                return self._quotient(*opened.args)
            if opened.op == "mul":  # e * (1 / sum(e))
                for e, other in (opened.args, opened.args[::-1]):
                    inverse = self.open(other)
                    if inverse.op == "div" and inverse.args[0].op == "number" and inverse.args[0].attr == 1:
                        return self._quotient(e, inverse.args[1])
            if opened.op == "exp":  # exp(log_softmax(x))
                return self._exponential(opened.args[0])
        except (Irregular, CannotWindow):
            return None
        return None

    def _safe(self, opened: Term) -> Softmax | None:
        """where(row is empty, 0, softmax(x))"""
        _, a, b = opened.args
        for zero, value in ((a, b), (b, a)):
            if zero.op == "number" and zero.attr == 0:
                inner = self.softmax(value)
                if inner is not None and not opened.args[0].axes & inner.axes:
                    return Softmax(inner.logits, inner.axes, True)
        return None

    def _quotient(self, numerator: Term, denominator: Term) -> Softmax | None:
        """exp(x - shift) / sum(exp(x - shift))"""
        over = self._summed(denominator, numerator)
        top = self.open(numerator)
        if over is None or top.op != "exp":
            return None
        return Softmax(self._unshifted(top.args[0], over), over, False)

    def _exponential(self, exponent: Term) -> Softmax | None:
        """exp(x - shift - log(sum(exp(x - shift))))"""
        if exponent.op == "leaf" and is_call(exponent.attr[0]) and opname(exponent.attr[0]) == "_log_softmax":
            node, dims = exponent.attr
            k: Any = argument(node, 1, "dim")
            return Softmax(self.request(node.args[0], dims), frozenset(dims[k % len(dims)]), False)
        for x, log in self._differences(exponent):
            opened = self.open(log)
            if opened.op != "log":
                continue
            total = self.open(opened.args[0])
            if total.op != "reduce" or total.attr[0] != "sum":
                continue
            e = self.open(total.args[0])
            if e.op == "exp" and e.args[0].op == "leaf" and x.op == "leaf" and e.args[0].attr[0] is x.attr[0]:
                self._hint(opened.args[0], x)
                over = _renamed(e.args[0], x, total.attr[1])
                if over:
                    return Softmax(self._unshifted(x, over), over, False)
        return None

    def _summed(self, denominator: Term, numerator: Term) -> frozenset[Atom] | None:
        """The axes of ``numerator`` that ``denominator`` is the sum of it over; None where it is no such sum."""
        total = self.open(denominator)
        if total.op != "reduce" or total.attr[0] != "sum" or total.args[0].op != "leaf" or numerator.op != "leaf":
            return None
        if total.args[0].attr[0] is not numerator.attr[0]:
            return None
        self._hint(denominator, numerator)
        return _renamed(total.args[0], numerator, total.attr[1]) or None

    def _hint(self, reduction: Term, whole: Term) -> None:
        """Let whoever reads ``reduction`` sum over the very axes of ``whole``: positions along them are the same."""
        node, dims = reduction.attr[0], whole.attr[1]
        if whole.op == "leaf" and len(dims) == len(shape_of(value_of(node.args[0]))):
            self.hints.update({(node, k): dims[k] for k in reduced_dims(node)[0]})

    def _unshifted(self, exponent: Term, over: frozenset[Atom]) -> Term:
        """``x`` in x - amax(x)."""
        for x, shift in self._differences(exponent):
            if not shift.axes & over and x.axes & over:
                top = self.open(shift)
                if top.op == "reduce" and top.attr[0] == "amax":
                    self._hint(shift, exponent)
                    return x
        return exponent

    def _differences(self, term: Term) -> Iterator[tuple[Term, Term]]:
        """Every (x, y) for which ``term`` is x - y."""
        opened = self.open(term)
        if opened.op != "add":
            return
        for x, minus in (opened.args, opened.args[::-1]):
            inner = self.open(minus)
            if inner.op == "mul":
                for y, sign in (inner.args, inner.args[::-1]):
                    if sign.op == "number" and sign.attr == -1:
                        yield x, y


def _renamed(inner: Term, outer: Term, gone: tuple[Atom, ...]) -> frozenset[Atom]:
    """The axes of ``outer`` where ``inner``, the same tensor, has the axes ``gone``; none where others differ."""
    mine, theirs = inner.attr[1], outer.attr[1]
    over: set[Atom] = set()
    for a, b in zip(mine, theirs, strict=True):
        if set(a) <= set(gone):
            over |= set(b)
        elif a != b:
            return frozenset()
    return frozenset(over)


def _whole(node: Node) -> bool:
    """Whether a slice is all of what it slices."""
    sizes = (shape_of(value_of(n)) for n in (node, node.args[0]))
    return all(same_size(a, b) for a, b in zip(*sizes, strict=True))


def _floats(node: Node) -> bool:
    """Whether a cast is between floating types: precision is not meaning."""
    values = value_of(node), value_of(node.args[0])
    return all(is_tensor(n) for n in (node, node.args[0])) and all(v.dtype.is_floating_point for v in values)
