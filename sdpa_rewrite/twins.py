"""The same attention in another layer: a site is certified once, and carried over to where the graph repeats itself.

Two neighbourhoods correspond when their nodes can be paired off: the same operators on the same constants, shapes,
strides, types and devices, the same readers in the same order, and leaves shared alike.  All that the analysis reads
of the one it would read of the other, so the certificate holds for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from sdpa_rewrite.algebra.axes import shape_of, size_of
from sdpa_rewrite.lift.ops import CASTS, LAYOUT, is_call, is_drawn_mask, opname, value_of
from sdpa_rewrite.site import Capture, Gradient, Operand, Site


@dataclass(frozen=True)
class Reading:
    """What an analysis looked at: ``opened`` nodes with their arguments, ``inner`` nodes with their readers too."""

    product: Node
    opened: frozenset[Node]
    inner: frozenset[Node]


class Different(Exception):
    """Two neighbourhoods do not correspond."""


def carried_over(site: Site, reading: Reading, product: Node) -> Site | None:
    """``site`` where ``product`` stands for its own product; None where the neighbourhoods differ (analyse afresh)."""
    try:
        pairs = Correspondence(reading).with_product(product)
    except Different:
        return None
    return moved(site, pairs.get)


class Correspondence:
    """The pairing of one neighbourhood with another, grown from the products."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.pairs: dict[Node, Node] = {}
        self.taken: dict[Node, Node] = {}
        self.stack: list[tuple[Node, Node]] = []

    def with_product(self, product: Node) -> Mapping[Node, Node]:
        """All pairs.  Raises ``Different``."""
        self._pair(self.reading.product, product)
        while self.stack:
            a, b = self.stack.pop()
            if a is self.reading.product or a in self.reading.inner or self._looked_into(a):
                self._pair_arguments(a, b)
            if a in self.reading.inner:
                self._pair_readers(a, b)
        return self.pairs

    def _looked_into(self, node: Node) -> bool:
        if node in self.reading.opened or is_drawn_mask(node):  # a mask corresponds where its dropout does
            return True
        return is_call(node) and (opname(node) in LAYOUT or opname(node) in CASTS)

    def _pair(self, a: Node, b: Node) -> None:
        known = self.pairs.get(a)
        if known is not None or b in self.taken:
            if known is not b:
                raise Different
            return
        if a.op != b.op and (a in self.reading.opened or a in self.reading.inner):
            raise Different
        if described(a) != described(b):
            raise Different
        self.pairs[a], self.taken[b] = b, a
        self.stack.append((a, b))

    def _pair_arguments(self, a: Node, b: Node) -> None:
        if a.op != b.op or a.target != b.target:
            raise Different
        if a.op != "call_function":
            return
        left, shape = pytree.tree_flatten((a.args, dict(a.kwargs)))
        right, other = pytree.tree_flatten((b.args, dict(b.kwargs)))
        if shape != other:
            raise Different
        for x, y in zip(left, right, strict=True):
            if isinstance(x, Node) and isinstance(y, Node):
                self._pair(x, y)
            elif isinstance(x, Node) or isinstance(y, Node) or type(x) is not type(y) or repr(x) != repr(y):
                raise Different

    def _pair_readers(self, a: Node, b: Node) -> None:
        if len(a.users) != len(b.users):
            raise Different
        for x, y in zip(a.users, b.users, strict=True):
            if x.op != y.op or (x.op == "call_function" and x.target != y.target):
                raise Different
            if x in self.reading.inner or x is self.reading.product:
                self._pair(x, y)


def described(node: Node) -> Any:
    """What an analysis may ask of a node's value."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        strides = tuple(size_of(s) for s in value.stride()) if value.layout == torch.strided else None
        return shape_of(value), strides, value.dtype, value.device
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    if isinstance(value, (tuple, list)):
        return len(value)
    return value


def moved(site: Site, to: Callable[[Node], Node | None]) -> Site:
    """``site`` with its nodes replaced by their counterparts; a node without one stays."""

    def node(n: Node) -> Node:
        return to(n) or n

    def operand(o: Operand) -> Operand:
        return Operand(node(o.node), o.dims)

    return replace(
        site,
        query=operand(site.query),
        key=operand(site.key),
        value=operand(site.value),
        captures=tuple(Capture(c.name, c.term, operand(c.operand)) for c in site.captures),
        result=operand(site.result),
        scores_node=node(site.scores_node),
        softmax_node=node(site.softmax_node),
        cotangent=operand(site.cotangent) if site.cotangent is not None else None,
        gradients=tuple(Gradient(g.role, operand(g.result)) for g in site.gradients),
    )
