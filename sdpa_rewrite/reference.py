"""The meaning of a Site, in eager PyTorch.  Everything else is measured against this."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sdpa_rewrite.algebra.interpret import World, evaluate
from sdpa_rewrite.site import Site


def attention(site: Site, world: World, values: Mapping[str, Tensor], pinned: Tensor | None = None) -> Tensor:
    """softmax(score_program(q . k)) . v with the weight program in between.

    ``values`` holds ``query``, ``key``, ``value`` and every capture by name, each with one dimension per axis of
    ``world``.  Differentiable.  ``pinned`` takes the place of the scores' values, not of their gradients.
    Returns the output, likewise over all axes of ``world``.
    """
    depth, columns = ([world.position[a] for a in dim] for dim in (site.depth, site.columns))
    scores = contract(values["query"], values["key"], depth)
    if pinned is not None:
        scores = pinned + (scores - scores.detach())
    fill_holes(world, site, values)
    world.values[site.terms.hole("score", site.scores_axes)] = scores
    logits = evaluate(site.score, world)
    logits = logits.expand(torch.broadcast_shapes(logits.shape, scores.shape))
    sink = world.expanded(evaluate(site.sink, world), ()) if site.sink is not None else None
    probabilities = normalise(logits, columns, sink, site.softmax)
    world.values[site.terms.hole("probability", site.scores_axes)] = probabilities
    weights = evaluate(site.weight, world)
    return contract(weights, values["value"], columns)


def contract(a: Tensor, b: Tensor, dims: list[int]) -> Tensor:
    """The sum over ``dims`` of a product."""
    return (a * b).sum(dims, keepdim=True) if dims else a * b


def fill_holes(world: World, site: Site, values: Mapping[str, Tensor]) -> None:
    """Give the captures their values."""
    for capture in site.captures:
        world.values[site.terms.hole(capture.name, capture.operand.axes)] = values[capture.name]


def normalise(logits: Tensor, dims: list[int], sink: Tensor | None, kind: str) -> Tensor:
    """Softmax over ``dims``; with a ``sink``, an extra logit in the denominator; ``safe``: rows of -inf give 0."""
    order = [k for k in range(logits.dim()) if k not in dims] + dims
    flat = logits.permute(order)
    lead = flat.shape[: logits.dim() - len(dims)]
    rows = flat.reshape(*lead, -1)
    if sink is not None:
        column = sink.permute(order).reshape(*(sink.shape[k] for k in order[: len(lead)]), -1)
        rows = torch.cat([rows, column.expand(*lead, 1)], -1)
    # by hand: the values are tiny in a proof, where torch.softmax would wake up threads
    empty = (rows == float("-inf")).all(-1, keepdim=True) if kind == "safe" else None
    if empty is not None:
        rows = rows.masked_fill(empty, 0.0)
    exponentials = (rows - rows.amax(-1, keepdim=True).detach()).exp()
    out = exponentials / exponentials.sum(-1, keepdim=True)
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
    if sink is not None:
        out = out[..., :-1]
    out = out.reshape(flat.shape)
    return out.permute([order.index(k) for k in range(logits.dim())])
