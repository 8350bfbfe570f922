"""A recognised attention, and why one was not recognised."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims
from sdpa_rewrite.algebra.term import Term, Terms

Softmax = Literal["softmax", "safe"]


class Miss(Exception):
    """Why a candidate is not a site: the text, the role that failed and the culprit node."""

    def __init__(self, text: str, role: str = "", node: Node | None = None) -> None:
        super().__init__(text)
        self.text, self.role, self.node = text, role, node


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph and the axes of its dimensions."""

    node: Node
    dims: Dims

    @property
    def axes(self) -> frozenset[Atom]:
        """All axes of the tensor."""
        return frozenset(a for d in self.dims for a in d)


@dataclass(frozen=True)
class Capture:
    """A value that the score or weight program reads: a term, and the graph's tensor that holds it.

    In the programs it stands as the hole ``name``.
    """

    name: str
    term: Term
    operand: Operand


@dataclass(frozen=True)
class Gradient:
    """A node of the backward that is the gradient of a role: ``query``, ``key``, ``value`` or a capture's name."""

    role: str
    result: Operand


@dataclass(frozen=True, eq=False)
class Site:
    """One attention.

    ``softmax_j(score_program(q . k)) . v`` over named axes: ``query`` has the axes ``batch``, ``rows`` and
    ``depth``, ``key`` ``batch``, ``columns`` and ``depth``, ``value`` ``batch``, ``columns`` and ``width``; key and
    value may lack batch axes (grouped and multi-query attention).  ``score`` and ``weight`` are terms with the holes
    ``score`` and ``probability``; ``sink`` is an extra logit of the denominator.  ``result`` is the graph's output
    node.  ``cotangent`` and ``gradients`` are the backward's, when the graph has one.
    """

    terms: Terms
    batch: tuple[Atom, ...]
    rows: Dim
    columns: Dim
    depth: Dim
    width: Dim
    query: Operand
    key: Operand
    value: Operand
    query_term: Term
    key_term: Term
    value_term: Term
    score: Term
    weight: Term
    softmax: Softmax
    sink: Term | None
    captures: tuple[Capture, ...]
    result: Operand
    result_term: Term
    scores_node: Node
    softmax_node: Node
    probability_term: Term = field(repr=False)
    scores_term: Term = field(repr=False)
    cotangent: Operand | None = None
    cotangent_term: Term | None = None
    gradients: tuple[Gradient, ...] = ()

    @property
    def training(self) -> bool:
        """Whether the graph has the backward."""
        return bool(self.gradients)

    def with_backward(self, operand: Operand, term: Term, gradients: tuple[Gradient, ...]) -> Site:
        """The site with its backward."""
        return replace(self, cotangent=operand, cotangent_term=term, gradients=gradients)

    def with_operand(self, capture: Capture, operand: Operand) -> Site:
        """The site that reads ``capture`` from ``operand``, which holds it along other axes."""
        if operand.axes == capture.operand.axes:
            return self
        terms, name = self.terms, capture.name
        holes = {terms.hole(name, capture.operand.axes): terms.hole(name, operand.axes)}
        return replace(
            self,
            score=terms.substitute(self.score, holes),
            weight=terms.substitute(self.weight, holes),
            sink=terms.substitute(self.sink, holes) if self.sink is not None else None,
            captures=tuple(replace(c, operand=operand) if c is capture else c for c in self.captures),
        )

    def with_source(self, capture: Capture, node: Node) -> Site:
        """The site that reads for ``capture`` a ``node`` of the same shape."""
        read = replace(capture, operand=Operand(node, capture.operand.dims))
        return replace(self, captures=tuple(read if c.name == capture.name else c for c in self.captures))

    def with_negated(self, capture: Capture, node: Node) -> Site:
        """The site that reads for ``capture``, a mask, a ``node`` that holds the opposite."""
        hole = self.terms.hole(capture.name, capture.operand.axes)
        opposite = {hole: self.terms.call("not", hole)}
        site = self.with_source(capture, node)
        return replace(
            site,
            score=self.terms.substitute(self.score, opposite),
            weight=self.terms.substitute(self.weight, opposite),
            sink=self.terms.substitute(self.sink, opposite) if self.sink is not None else None,
        )

    def with_result(self, result: Operand) -> Site:
        """The site whose output is another tensor."""
        return replace(self, result=result)

    @property
    def operands(self) -> tuple[Node, ...]:
        """The nodes that this site reads."""
        cotangent = (self.cotangent,) if self.cotangent is not None else ()
        return tuple(
            o.node for o in (self.query, self.key, self.value, *(c.operand for c in self.captures), *cotangent)
        )

    @property
    def scores_axes(self) -> frozenset[Atom]:
        """The axes of the scores."""
        return frozenset((*self.batch, *self.rows, *self.columns))
