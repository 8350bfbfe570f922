"""Operators that work along a dimension and are neither pointwise nor a plain reduction: evaluated whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Dims, Window, same_size
from sdpa_rewrite.algebra.term import Slot, Term
from sdpa_rewrite.lift import reductions
from sdpa_rewrite.lift.ops import argument, is_drawn_mask, opname, value_of
from sdpa_rewrite.lift.pointwise import template_of
from sdpa_rewrite.site import Miss

if TYPE_CHECKING:
    from sdpa_rewrite.lift.lifter import Lifter


def _largest_at(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.max(dim, keepdim=True).indices


def getitem(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    """max(x, dim) -> (values, indices); native_dropout(x, p) -> (x * mask / (1 - p), mask)"""
    source: Any = node.args[0]
    if opname(source) == "native_dropout" and node.args[1] == 0:
        return _dropped(lifter, source, dims)
    if opname(source) != "max" or not isinstance(value_of(source), (tuple, list)):
        return None
    below, gone = reductions.input_dims(lifter, source, dims)
    x = lifter.request(source.args[0], below)
    if node.args[1] == 0:
        return lifter.terms.reduce("amax", x, gone)
    (k,), keep = reductions.reduced_dims(source)
    if not keep:
        return None
    return lifter.terms.along(_largest_at, template_of((Slot(0), k)), dims, (below,), (x,))


def _dropped(lifter: Lifter, source: Node, dims: Dims) -> Term | None:
    mask = next((user for user in source.users if is_drawn_mask(user)), None)
    rate = source.args[1]
    if mask is None:
        raise Miss("the graph does not keep the dropout's mask, which torch's own generator draws", "weight", source)
    if source.args[2] is not True or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        return None
    terms = lifter.terms
    kept = terms.call("mul", terms.call("float", lifter.leaf(mask, dims)), terms.number(1.0 / (1.0 - rate)))
    return terms.call("mul", lifter.request(source.args[0], dims), kept)  # type: ignore[arg-type]


def whole(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    """scatter(zeros, dim, index, source): the gradient of a maximum."""
    if opname(node) != "scatter":
        return None
    base, dim, index, source = (argument(node, k, n) for k, n in enumerate(("self", "dim", "index", "src")))
    if not isinstance(value_of(source), torch.Tensor) or value_of(index).shape != value_of(source).shape:
        return None
    k = int(dim) % len(dims)
    if len(dims[k]) == 1 and isinstance(dims[k][0], Window):  # a slice of the result: the result, then its part
        return _part(lifter, node, dims, k)
    if int(value_of(index).shape[k]) != 1:
        return None
    narrow: Dims = (*dims[:k], (), *dims[k + 1 :])
    args = (lifter.request(base, dims), lifter.request(index, narrow), lifter.request(source, narrow))
    template = template_of((Slot(0), k, Slot(1), Slot(2)))
    return lifter.terms.along(torch.scatter, template, dims, (dims, narrow, narrow), args)


def _part(lifter: Lifter, node: Node, dims: Dims, k: int) -> Term:
    window: Any = dims[k][0]
    every = lifter.bind((node, "whole"), window.size, dims, "w")
    full = lifter.request(node, (*dims[:k], every, *dims[k + 1 :]))
    piece = None if same_size(window.base.size, 1) else window.base
    return lifter.terms.part(full, every[0], piece, window.offset)
