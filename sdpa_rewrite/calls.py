"""Attention that is a call already: ATen's flash attention on CPU, which our own kernels may do faster.

Such a call needs no proof: its schema says what it means.  A site is made of it that is like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Size, quotient, same_size, shape_of
from sdpa_rewrite.algebra.term import Term, Terms
from sdpa_rewrite.lift.ops import argument, is_call
from sdpa_rewrite.site import Capture, Gradient, Operand, Site

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
INFINITY = float("inf")
MASK = "mask"


def called_sites(graph: Graph) -> Iterator[Site]:
    """A site for each call of ATen's CPU kernel whose logsumexp only its own backward reads."""
    for node in graph.nodes:
        if is_call(node) and node.target is FORWARD:
            site = _site(node)
            if site is not None:
                yield site


def _site(node: Node) -> Site | None:
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if 0 not in parts or len(parts) != len(node.users) or argument(node, 3, "dropout_p", 0.0):
        return None
    readers = list(parts[1].users) if 1 in parts else []
    if any(user.target is not BACKWARD for user in readers) or len(readers) > 1:
        return None
    shapes = [shape_of(n.meta["val"]) for n in node.args[:3]]  # type: ignore[union-attr]
    group = quotient(shapes[0][1], shapes[1][1])
    if group is None or any(same_size(n, 0) for shape in shapes for n in shape):
        return None
    return _Call(node, shapes, group).site(parts[0], readers[0] if readers else None)


class _Call:
    """The axes and terms of one call."""

    def __init__(self, node: Node, shapes: list[tuple[Size, ...]], group: Size) -> None:
        self.node, self.terms = node, Terms()
        query, key, value = shapes
        self.batch, self.heads, self.group = _dim("b", query[0]), _dim("h", key[1]), _dim("g", group)
        self.rows, self.columns = _dim("i", query[2]), _dim("j", key[2])
        self.depth, self.width = _dim("d", query[3]), _dim("e", value[3])

    def site(self, result: Node, backward: Node | None) -> Site:
        """The site of the call."""
        terms = self.terms
        shared = (self.batch, self.heads)
        query = self._operand(0, (self.batch, self.heads + self.group, self.rows, self.depth))
        key = self._operand(1, (*shared, self.columns, self.depth))
        value = self._operand(2, (*shared, self.columns, self.width))
        batch = (*self.batch, *self.heads, *self.group)
        scores = frozenset((*batch, *self.rows, *self.columns))
        hole, probability = terms.hole("score", scores), terms.hole("probability", scores)
        captures, score = self._score(hole)
        out = Operand(result, (self.batch, self.heads + self.group, self.rows, self.width))
        leaf = [terms.leaf(o.node, o.dims) for o in (query, key, value, out)]
        site = Site(
            terms=terms,
            batch=batch,
            rows=self.rows,
            columns=self.columns,
            depth=self.depth,
            width=self.width,
            query=query,
            key=key,
            value=value,
            query_term=leaf[0],
            key_term=leaf[1],
            value_term=leaf[2],
            score=score,
            weight=probability,
            softmax="safe",
            sink=None,
            captures=captures,
            result=out,
            result_term=leaf[3],
            scores_node=self.node,
            softmax_node=self.node,
            probability_term=probability,
            scores_term=hole,
        )
        return site if backward is None else self._with_backward(site, backward)

    def _operand(self, position: int, dims: Dims) -> Operand:
        node: Any = self.node.args[position]
        return Operand(node, dims)

    def _score(self, hole: Term) -> tuple[tuple[Capture, ...], Term]:
        """The mask, if it is a tensor, and the score program."""
        terms = self.terms
        scale = argument(self.node, 6, "scale", None)
        if scale is None:
            query = self.node.args[0].meta["val"]  # type: ignore[union-attr]
            scale = query.shape[-1] ** -0.5
        logit = terms.call("mul", hole, terms.number(_number(scale)))
        if argument(self.node, 4, "is_causal", False):
            visible = terms.call("le", terms.index(self.columns), terms.index(self.rows))
            logit = terms.call("where", visible, logit, terms.number(-INFINITY))
        mask: Node | None = argument(self.node, 5, "attn_mask", None)
        if mask is None:
            return (), logit
        dims = self._mask_dims(mask)
        operand = Operand(mask, dims)
        capture = Capture(MASK, terms.leaf(mask, dims), operand)
        return (capture,), terms.call("add", logit, terms.hole(MASK, operand.axes))

    def _mask_dims(self, mask: Node) -> Dims:
        full = (self.batch, self.heads + self.group, self.rows, self.columns)
        shape = shape_of(mask.meta["val"])
        dims = full[len(full) - len(shape) :]
        return tuple(() if same_size(n, 1) else dim for n, dim in zip(shape, dims, strict=True))

    def _with_backward(self, site: Site, backward: Node) -> Site:
        cotangent: Any = backward.args[0]
        operands = {"query": site.query, "key": site.key, "value": site.value}
        names = list(operands)
        gradients = tuple(
            Gradient(names[user.args[1]], Operand(user, operands[names[user.args[1]]].dims))  # type: ignore[index]
            for user in backward.users
        )
        operand = Operand(cotangent, site.result.dims)
        return site.with_backward(operand, site.terms.leaf(cotangent, site.result.dims), gradients)


def _dim(name: str, size: Size) -> Dim:
    return () if same_size(size, 1) else (Atom(name, size),)


def _number(value: Any) -> Any:
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else float(value)
