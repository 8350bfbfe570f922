"""The meaning of a Site, in eager PyTorch.  Everything else is measured against this."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sdpa_rewrite.algebra.interpret import World, evaluate
from sdpa_rewrite.site import Site


def attention(site: Site, world: World, values: Mapping[str, Tensor]) -> Tensor:
    """softmax(score_program(q . k)) . v with the weight program in between.

    ``values`` holds ``query``, ``key``, ``value`` and every capture by name, each with one dimension per axis of
    ``world``.  Differentiable.  Returns the output, likewise over all axes of ``world``.
    """
    at = {name: [world.position[a] for a in dim] for name, dim in _contracted(site)}
    scores = contract(values["query"], values["key"], at["depth"])
    fill_holes(world, site, values)
    world.values[site.terms.hole("score", site.scores_axes)] = scores
    logits = evaluate(site.score, world)
    logits = logits.expand(torch.broadcast_shapes(logits.shape, scores.shape))
    sink = evaluate(site.sink, world) if site.sink is not None else None
    probabilities = normalise(logits, at["columns"], sink, site.softmax)
    world.values[site.terms.hole("probability", site.scores_axes)] = probabilities
    weights = evaluate(site.weight, world)
    return contract(weights, values["value"], at["columns"])


def _contracted(site: Site) -> tuple[tuple[str, tuple[object, ...]], ...]:
    return ("depth", site.depth), ("columns", site.columns)


def contract(a: Tensor, b: Tensor, dims: list[int]) -> Tensor:
    return (a * b).sum(dims, keepdim=True) if dims else a * b


def fill_holes(world: World, site: Site, values: Mapping[str, Tensor]) -> None:
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
    exponentials = (rows - rows.amax(-1, keepdim=True).detach()).exp()
    out = exponentials / exponentials.sum(-1, keepdim=True)
    if sink is not None:
        out, rows = out[..., :-1], rows[..., :-1]
    if kind == "safe":
        out = torch.where((rows == float("-inf")).all(-1, keepdim=True), 0.0, out)
    out = out.reshape(flat.shape)
    return out.permute([order.index(k) for k in range(logits.dim())])
