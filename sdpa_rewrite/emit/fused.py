"""The ``fused`` emitter: our own kernels, emitted by Inductor in C++, forward and backward.

Any pointwise score program and any factor of the probabilities, dropout included; key and value are read where they
lie, captures through the axes that they have.  A sink and a factor per row are put on the output by way of the rows'
statistics.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Dims, atoms_of, product, same_size
from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.emit.base import Inputs, compute_dtype, device_of, dtype_of, inlines
from sdpa_rewrite.emit.heads import Heads, heads_of, in_groups
from sdpa_rewrite.emit.programs import Programs, drawn
from sdpa_rewrite.emit.rows import logit_dtype, other_infinities, zeroed
from sdpa_rewrite.emit.scalars import SCALAR
from sdpa_rewrite.emit.scale import finite_number, leading_factor
from sdpa_rewrite.emit.visible import visibility
from sdpa_rewrite.emit.weights import Weights, weights_of
from sdpa_rewrite.kernels.cpu import lowering as cpu_lowering
from sdpa_rewrite.kernels.op import differentiable_attention
from sdpa_rewrite.kernels.spec import Spec, name_of
from sdpa_rewrite.lift.ops import is_call, opname
from sdpa_rewrite.site import Capture, Operand, Site

INFINITY = float("inf")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROLES = frozenset({"query", "key", "value"})


class Fused:
    """Our own kernels."""

    name = "fused"

    def reasons_against(self, site: Site) -> list[str]:
        """Why our kernels cannot take the site."""
        kind = device_of(site).type
        if kind != "cpu":
            return [f"our kernels are for CPU, not for {kind}"]
        return [*_type_reasons(site), *_program_reasons(site)]

    def prepared(self, site: Site) -> Site:
        """Dropout is read from its random numbers, which the kernel can draw, a negated mask before it is negated."""
        for capture in site.captures:
            draw, mask = drawn(capture), negated_mask(capture)
            if draw is not None and draw.numbers.meta["val"].shape == capture.operand.node.meta["val"].shape:
                site = site.with_source(capture, draw.numbers)
            elif mask is not None:
                site = site.with_negated(capture, mask)
        return site

    def emit(self, site: Site, inputs: Inputs) -> tuple[Tensor, Dims]:
        """Call the operator; the output has the dimensions batch, heads of the keys, group, rows, width."""
        heads = heads_of(site)
        own = (heads.batch, heads.shared)
        dims = (*own, heads.group, site.rows, site.width)
        operands: dict[str, Dims] = {
            "query": (*dims[:4], site.depth),
            "key": (*own, site.columns, site.depth),
            "value": (*own, site.columns, site.width),
        }
        weights = weights_of(site)
        assert weights is not None, "reasons_against"
        dtype = compute_dtype(site)
        if weights.row_sum is not None:  # in half a sum may be too small to divide by
            dtype = torch.promote_types(dtype, torch.float32)
        q, k, v = (inputs.arranged(role, list(d)).to(dtype) for role, d in operands.items())
        if weights.row_sum is not None:
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        cpu_lowering.register()
        programs, numbers, spec = _programs(site, inputs, heads, weights)
        spec = dataclasses.replace(
            spec,
            dtype=name_of(dtype),
            order=_order(site.result, dims, lasts=(4,)),
            grad_orders=tuple(_grad_order(site, role, d) for role, d in operands.items()),
        )
        out, maximum, total = differentiable_attention(q, k, v, tuple(programs.captures), numbers, spec)
        if weights.nan_is_zero:
            out = torch.where((total.isnan() | (maximum == -INFINITY))[..., None], 0.0, out)
        share = _row_share(site, inputs, dims[:4], weights, out, maximum, total)
        if weights.row_sum is not None:
            out = out[..., :-1]
        if share is not None:
            out = (out * share[..., None]).to(out.dtype)
        return out.to(dtype_of(site.result)), dims


def _programs(site: Site, inputs: Inputs, heads: Heads, weights: Weights) -> tuple[Programs, tuple[Any, ...], Spec]:
    """The programs of the call, its numbers and its static part."""
    learned = frozenset(g.role for g in site.gradients) - ROLES
    programs = Programs(site, heads, inputs, logit_dtype(inputs), learned)
    hole = site.terms.hole("score", site.scores_axes)
    score, scale = split_scale(site)
    seen = visibility(site, score, learned)
    numbers = [inputs.sizes.of(a.size) for a in programs.axes]
    parts: dict[str, Any] = {}
    if score is not hole:
        parts["score"] = programs.add_of_score(score)
        parts["score_backward"] = programs.add_backward(score) if site.training else None
    if seen.hides and seen.bare is not hole:
        parts["bare"] = programs.add_of_score(seen.bare)
        parts["bare_backward"] = programs.add_backward(seen.bare) if site.training else None
    if not weights.trivial:
        parts["factor"] = programs.add(weights.factor)
    if seen.code is not None:
        parts["visible"] = programs.add(seen.code)
    for name, bound in (("low", seen.low), ("high", seen.high)):
        if bound is not None:
            parts[name] = len(numbers)
            numbers.append(inputs.sizes.of(int(bound) if bound.is_Integer else bound))
    spec = Spec(
        split=tuple(map(len, programs.groups)),
        inputs=tuple(programs.inputs),
        learned=tuple(programs.learned_inputs),
        scale=scale,
        safe=site.softmax == "safe" or site.sink is not None or zeroed(site) is not None or weights.nan_is_zero,
        floor=seen.floor,
        **parts,
    )
    return programs, tuple(numbers), spec


def split_scale(site: Site) -> tuple[Term, float]:
    """The score program without the number that the score is multiplied by first, and that number."""
    rest, factor = leading_factor(site) or (site.score, site.terms.number(1.0))
    number = finite_number(factor)
    return (site.score, 1.0) if number is None else (rest, number)


def negated_mask(capture: Capture) -> Node | None:
    """The mask that a capture is the opposite of, if it is one: reading it saves a tensor as large as the mask."""
    node = capture.operand.node
    if not is_call(node) or opname(node) not in ("bitwise_not", "logical_not"):
        return None
    (source,) = node.all_input_nodes
    return source if source.meta["val"].dtype == torch.bool else None


def _grad_order(site: Site, role: str, dims: Dims) -> tuple[int, ...]:
    """That of the role's gradient, whose rows or columns may be innermost where it is that of key or value."""
    gradient = next((g.result for g in site.gradients if g.role == role), None)
    if gradient is None:
        return tuple(range(len(dims)))
    return _order(gradient, dims, lasts=(4,) if role == "query" else (2, 3))


def _order(wanted: Operand, dims: Dims, lasts: tuple[int, ...]) -> tuple[int, ...]:
    """The order of ``dims`` in memory that makes them ``wanted``, so that it need not be copied.

    One of ``lasts`` must be the innermost; where that cannot be, and for symbolic strides, as the dimensions come.
    """
    usual = tuple(range(len(dims)))
    strides = wanted.node.meta["val"].stride()
    places = list(range(len(strides)))
    if all(isinstance(s, int) for s in strides):
        places.sort(key=lambda k: -strides[k])
    axes = [a for k in places for a in wanted.dims[k]]
    found: list[int] = []
    at = 0
    while at < len(axes):
        dim = next((k for k, d in enumerate(dims) if d and k not in found and tuple(axes[at : at + len(d)]) == d), None)
        if dim is None:
            return usual
        found.append(dim)
        at += len(dims[dim])
    order = (*(k for k in usual if k not in found), *found)
    return order if order[-1] in lasts else usual


def _row_share(
    site: Site, inputs: Inputs, dims: Dims, weights: Weights, out: Tensor, maximum: Tensor, total: Tensor
) -> Tensor | None:
    """What the rows of the output are multiplied by: their part beside the sink, and a weight that all keys share."""
    shares: list[Tensor] = []
    if site.sink is not None:
        empty = maximum == -INFINITY
        logsumexp = torch.where(empty, -INFINITY, maximum + torch.where(empty, 1.0, total).log())
        share = torch.sigmoid(logsumexp - _per_row(site, inputs, dims, site.sink))
        shares.append(torch.where(empty, 0.0, share) if site.softmax == "safe" else share)
    zero = zeroed(site)
    if zero is not None:
        nothing = _over_columns(site, inputs, dims, zero, {}).all(-1)
        shares.append(torch.where((maximum == -INFINITY) & ~nothing, math.nan, 1.0))
    if weights.share is not site.terms.number(1.0):
        known = {}
        if weights.row_sum is not None:
            known[weights.row_sum] = functools.reduce(torch.mul, shares, out[..., -1])
        shares.append(_per_row(site, inputs, dims, weights.share, known))
    return functools.reduce(torch.mul, shares) if shares else None


def _per_row(site: Site, inputs: Inputs, dims: Dims, term: Term, known: dict[Term, Tensor] | None = None) -> Tensor:
    """A term that does not vary along the columns, as (batch, heads, group, rows), of size one where it is constant.

    ``known`` has holes' values in these four dimensions.
    """
    return _over_columns(site, inputs, dims, term, known or {})[..., 0]


def _over_columns(site: Site, inputs: Inputs, dims: Dims, term: Term, known: dict[Term, Tensor]) -> Tensor:
    """A term as (batch, heads, group, rows, columns), of size one where it is constant."""
    groups = (*dims, site.columns)
    world = inputs.world(site, list(atoms_of(groups)), logit_dtype(inputs))
    apart = [*(inputs.sizes.of(a.size) for a in atoms_of(dims)), *(1 for _ in site.columns)]
    world.values.update((hole, value.reshape(apart)) for hole, value in known.items())
    return in_groups(groups, evaluate(term, world), world)


# -- reasons -------------------------------------------------------------------------------------------------


def _type_reasons(site: Site) -> list[str]:
    reasons = []
    if compute_dtype(site) not in FLOATS:
        reasons.append(f"our kernels do not compute in {compute_dtype(site)}")
    sizes = [*(a.size for a in site.batch), *(product(d) for d in (site.rows, site.columns, site.depth, site.width))]
    if any(same_size(n, 0) for n in sizes):
        reasons.append("an empty dimension")
    return reasons


def _program_reasons(site: Site) -> list[str]:
    reasons = []
    weights = weights_of(site)
    if weights is None:
        reasons.append("the probabilities are not only multiplied after the softmax")
    inner = [site.score] if weights is None else [site.score, weights.factor]
    for term in dict.fromkeys(t for program in inner for t in subterms(program)):
        if term.op == "apply" and not inlines(term.attr[0]):
            reasons.append(f"the program applies {term.attr[0]}, which a kernel cannot inline")
        elif term.op not in ("apply", "hole", "number", "index", "float", *SCALAR):
            reasons.append(f"the program is not pointwise: {term.op}")
    learned = {g.role for g in site.gradients} - ROLES
    if weights is not None:
        if any(t.op == "hole" and t.attr in learned for t in subterms(weights.factor)):
            reasons.append("what the probabilities are multiplied by needs a gradient")
        reasons += _random_reasons(site, weights.factor)
    kept = zeroed(site) is not None or (weights is not None and weights.nan_is_zero)
    if site.training and kept and (others := other_infinities(site)):
        reasons.append(f"a row of -inf by {others[0]}, which is set to 0 in part, has NaN in part of a gradient")
    if any(drawn(c) for c in site.captures if _reads(site.score, c.name)):
        reasons.append("the score program draws random numbers")
    return reasons


def _reads(term: Term, name: str) -> bool:
    return any(t.op == "hole" and t.attr == name for t in subterms(term))


def _random_reasons(site: Site, factor: Term) -> list[str]:
    """Dropout: the kernel draws what Inductor's generator draws, and there is no other generator it could follow."""
    from torch._inductor import config as inductor

    draws = [(c, d) for c in site.captures if _reads(factor, c.name) and (d := drawn(c)) is not None]
    if draws and inductor.fallback_random:
        return ["dropout with eager's generator (fallback_random), whose numbers depend on the order of drawing"]
    reasons = []
    for capture, draw in draws:
        axes = [a for d in capture.operand.dims for a in d]
        if set(axes) != set(site.scores_axes):
            reasons.append(f"the random numbers of {draw.numbers.name} are not one per score")
    return reasons
