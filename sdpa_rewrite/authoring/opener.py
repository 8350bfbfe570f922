"""A graph read lazily: one operator at a time, as far as a pattern asks.

The graph and the pattern's own trace are both read by this, so that what one spelling becomes, the other does too.
All the patterns that are asked at a place share an opener, so that each operator there is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Irregular, Refine, Window, atoms_of, same_size, shape_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.authoring.relation import of_positions
from sdpa_rewrite.lift.layout import pull
from sdpa_rewrite.lift.lifter import Axes, CannotWindow, Lifter, align_all
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
    """An axis has to be split: what was read so far has to be read again, by ``opener``."""

    def __init__(self, opener: Opener) -> None:
        super().__init__()
        self.opener = opener


@dataclass(frozen=True)
class Softmax:
    """``softmax(logits)`` over ``axes``; ``safe``: a row that is -inf as a whole is 0."""

    logits: Term
    axes: frozenset[Atom]
    safe: bool


@dataclass(frozen=True, eq=False)
class Looked:
    """What was looked at so far: the nodes that were opened, the axes that each tensor was read along first, the axes
    that reductions share with what they are beside, and the questions whose answers all of this is from."""

    nodes: dict[Node, None] = field(default_factory=dict)
    read: dict[Node, Dims] = field(default_factory=dict)
    hints: dict[Any, Dim] = field(default_factory=dict)
    answers: set[Answer] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to a question about a term (``Again``, if that is what it is), and what was looked at for it."""

    value: Any
    looked: Looked


class Opener(Lifter):
    """Opens terms of one graph.  What an operator reads stays closed until it is asked for.

    A question is answered once, whoever asks; what an attempt has looked at is what its own questions look at, so that
    no pattern sees what another one asked.  The axes stay as they are: where one has to be split, ``Again`` has another
    opener, the same for all who come to that split.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, Everything())
        self._answers: dict[tuple[Any, Term], Answer] = {}
        self._inside: dict[Term, dict[Node, None]] = {}
        self._split: dict[tuple[Atom, Any, Any], Opener] = {}
        self._listen(Looked())

    def afresh(self) -> Opener:
        """The same opener for another attempt, which has looked at nothing yet."""
        self._listen(Looked())
        return self

    def after(self, refine: Refine) -> Opener:
        """The opener with an axis split.  Raises ``Irregular``."""
        key = refine.atom, refine.outer, refine.inner
        if key not in self._split:
            self._split[key] = Opener(self.axes.after(refine))
        return self._split[key].afresh()

    def _listen(self, looked: Looked) -> None:
        self._looked, self._seen, self.hints = looked, looked.read, looked.hints

    def once(self, what: Any, term: Term, answer: Callable[[Term], Any], unread: Any) -> Any:
        """``answer(term)`` to the question ``what``; ``unread`` where it does not fit what was read before.

        Raises ``Again``.
        """
        known = self._answers.get((what, term))
        if known is None:
            known = self._answers[what, term] = self._answered(answer, term)
        if isinstance(known.value, Again):
            raise Again(known.value.opener.afresh())
        if known not in self._looked.answers:
            try:
                self._look(known)
            except Irregular:
                return unread
            except Refine as refine:
                raise Again(self.after(refine)) from refine
        return known.value

    def _answered(self, answer: Callable[[Term], Any], term: Term) -> Answer:
        outer = self._looked
        self._listen(Looked())
        try:
            return Answer(answer(term), self._looked)
        except Again as again:
            return Answer(again, self._looked)
        finally:
            self._listen(outer)

    def _look(self, answer: Answer) -> None:
        """Look at all that an answer is from.  Raises ``Refine`` and ``Irregular``, as ``leaf`` does."""
        mine, theirs = self._looked, answer.looked
        mine.nodes.update(theirs.nodes)
        for node, dims in theirs.read.items():
            align_all(dims, mine.read.setdefault(node, dims))
        mine.hints.update(theirs.hints)
        mine.answers.update(theirs.answers, (answer,))

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
            term = self._pointwise(node, dims)
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
        opened: Term = self.once("open", term, self._opened, term)
        return opened

    def _opened(self, term: Term) -> Term:
        opened = self._read(term)
        if opened.op == "leaf" and opened is not term:  # x * 1, x + 0
            opened = self.open(opened)
        self._looked.nodes[term.attr[0]] = None
        self.note_parts(opened, term.attr[0])
        return opened

    def note_parts(self, opened: Term, node: Node) -> None:
        """Let the parts of an opened operator, as far as no node holds them, be told by the operator's node."""
        for part in subterms(opened):
            if part.op != "leaf":
                self._inside.setdefault(part, {})[node] = None

    def nodes_of(self, term: Term) -> tuple[Node, ...]:
        """The node that ``term`` is, or those that it is a part of, as far as they were looked at."""
        if term.op == "leaf":
            return (term.attr[0],)
        holding = self._inside.get(term, {})
        return tuple(n for n in self._looked.nodes if n in holding) if len(holding) > 1 else tuple(holding)

    def _read(self, term: Term) -> Term:
        node, dims = term.attr
        if not is_call(node) or any(isinstance(a, Window) for a in atoms_of(dims)):
            return term
        try:
            return self._open(node, opname(node), dims) or term
        except (Irregular, CannotWindow):
            return term
        except Refine as refine:
            raise Again(self.after(refine)) from refine

    def looked_at(self) -> Set[Node]:
        """All nodes that this attempt has opened."""
        return self._looked.nodes.keys()

    def whole(self, term: Term) -> Term:
        """``term`` with all its pointwise operators opened, as far as they can be read."""
        if term.op != "leaf" or any(isinstance(a, Window) for a in atoms_of(term.attr[1])):
            return term
        whole: Term = self.once("whole", term, self._whole, term)
        return whole

    def _whole(self, term: Term) -> Term:
        try:
            return self._pointwise(*term.attr)
        except (Irregular, CannotWindow):
            return term
        except Refine as refine:
            raise Again(self.after(refine)) from refine

    def _pointwise(self, node: Node, dims: Dims) -> Term:
        """A value as a whole: a question of its own, as large as it may be."""
        lifter = Lifter(self.axes, set())
        lifter.terms = self.terms
        return lifter.request(node, dims)

    def of_positions(self, term: Term) -> bool:
        """Whether ``term`` is made of positions and numbers only."""
        return bool(self.once("of positions", term, lambda t: of_positions(self.whole(t)), False))

    # -- what several operators make together ---------------------------------------------------------------

    def softmax(self, term: Term) -> Softmax | None:
        """The softmax that ``term`` is, however it is spelled, if it is one."""
        if term.op != "leaf" or not is_call(term.attr[0]):
            return None
        softmax: Softmax | None = self.once("softmax", term, self._softmax, None)
        return softmax

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
