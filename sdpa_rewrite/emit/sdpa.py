"""The ``sdpa`` emitter: ATen's scaled dot-product attention.

Takes score programs of the form ``scale * s + mask``.  What its masks need to mean what the user wrote is in ``masks``.
"""

from __future__ import annotations

import math

import sympy
import torch
from torch import Tensor

from sdpa_rewrite import config
from sdpa_rewrite.algebra.axes import Atom, Dims, product, same_size
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.emit.affine import Affine, NotAffine, affine, may_mask
from sdpa_rewrite.emit.arrange import RealWorld
from sdpa_rewrite.emit.base import Inputs, compute_dtype, device_of, dtype_of
from sdpa_rewrite.emit.dropout import dropout_rate
from sdpa_rewrite.emit.heads import Heads, heads_of
from sdpa_rewrite.emit.masks import Masked, masked
from sdpa_rewrite.emit.rows import per_row, row_factor
from sdpa_rewrite.site import Site

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SDPA:
    """ATen's fused kernels: flash attention on CPU; on CUDA whichever of its kernels torch selects."""

    name = "sdpa"

    def reasons_against(self, site: Site) -> list[str]:
        """Why ATen's kernels cannot take the site."""
        reasons = [*_program_reasons(site), *_type_reasons(site), *_copy_reasons(site)]
        if device_of(site).type == "cpu":
            reasons += _cpu_reasons(site)
        elif device_of(site).type == "cuda":
            reasons += _cuda_reasons(site)
        else:
            reasons.append(f"no SDPA kernel for {device_of(site).type}")
        return reasons

    def prepared(self, site: Site) -> Site:
        """As it is."""
        return site

    def emit(self, site: Site, inputs: Inputs) -> tuple[Tensor, Dims]:
        """Call the kernel; the output has the dimensions batch, heads, rows, width."""
        form = affine(site)
        heads = heads_of(site, _varying(site, form))
        dtype = compute_dtype(site)
        q, k, v = (_operand(site, inputs, role, heads).to(dtype) for role in ("query", "key", "value"))
        causal = form.causal(site)
        world = _mask_world(site, inputs, heads, dtype)
        q, scale = _scaled(site, inputs, form, heads, q, world)
        rows = Masked(q) if causal else masked(site, form, heads, world, q)
        q, k, padded = _equal_widths(site, rows.query, k, v)
        if device_of(site).type == "cpu":
            out, logsumexp = _cpu(q, k, padded, rows.mask, causal, scale)
        else:
            out, logsumexp = _other(q, k, padded, rows.mask, causal, scale, dropout_rate(site) or 0.0), None
        if not same_size(product(site.depth), product(site.width)):
            out = out[..., : v.shape[-1]]
        out = rows.finished(out, v)
        if site.sink is not None:
            assert logsumexp is not None
            out = _less_sink(site, inputs, heads, out, logsumexp.detach())
        out = _weighted(site, inputs, heads, out)
        return out.to(dtype_of(site.result)), (heads.batch, heads.heads, site.rows, site.width)


def _program_reasons(site: Site) -> list[str]:
    reasons = []
    try:
        form = affine(site)
        if site.training and form.scale.op != "number" and _is_nan_scale(form.scale):
            reasons.append("the scale is not a number")
    except NotAffine as error:
        return [str(error)]
    if site.softmax == "safe" and form.floor is not None:
        reasons.append("safe softmax over clamped scores")
    reasons += _weight_reasons(site)
    if site.sink is not None and (site.training or device_of(site).type != "cpu"):
        reasons.append("a sink: ATen's logsumexp has no gradient")
    if any(f.finite and (site.training or not f.absorbs) for f in form.fills) and any(
        may_mask(site, b) for b in form.bias
    ):
        reasons.append("scores are masked by a finite value beside a tensor that may mask too")
    masks = {g.role for g in site.gradients} - {"query", "key", "value"}
    bias = {name for t in (*form.bias, *(f.condition for f in form.fills)) for name in _captures(t)}
    if masks & bias:
        reasons.append("the mask (bias) needs a gradient")
    return reasons


def _weight_reasons(site: Site) -> list[str]:
    if row_factor(site) is not None:
        return []
    if dropout_rate(site) is None:
        return ["the probabilities are changed after the softmax (by a weight program)"]
    if device_of(site).type == "cpu":
        return ["dropout on the probabilities: ATen's kernels for CPU have none"]
    if config.dropout != "any":
        return ["dropout on the probabilities: ATen's kernels draw a mask of their own (config.dropout is 'exact')"]
    return []


def _is_nan_scale(term: Term) -> bool:
    return term.op == "number" and isinstance(term.attr, float) and math.isnan(term.attr)


def _captures(term: Term) -> list[str]:
    names = [term.attr] if term.op == "hole" else []
    return names + [n for a in term.args for n in _captures(a)]


def _type_reasons(site: Site) -> list[str]:
    reasons = []
    for role in ("query", "key", "value"):
        dtype = dtype_of(getattr(site, role))
        if dtype not in FLOATS:
            reasons.append(f"the {role} is {dtype}")
    if dtype_of(site.result) not in FLOATS:
        reasons.append(f"the output is {dtype_of(site.result)}")
    for name, dim in (("rows", site.rows), ("columns", site.columns), ("depth", site.depth), ("width", site.width)):
        if same_size(product(dim), 0) or any(same_size(a.size, 0) for a in site.batch):
            reasons.append(f"an empty dimension ({name})")
            break
    return reasons


def _copy_reasons(site: Site) -> list[str]:
    """Batch axes that only one of key and value has: the kernel wants the other copied along them."""
    rows, batch = product(site.rows), set(site.batch)
    reasons = []
    for role, operand, other, size in (
        ("keys", site.key, site.value, product(site.depth)),
        ("values", site.value, site.key, product(site.width)),
    ):
        shared = (other.axes - operand.axes) & batch
        if shared and isinstance(rows, int) and isinstance(size, int) and rows < size:
            reasons.append(f"a copy of the {role} for each of {product(shared)} would be larger than the scores")
    return reasons


def _cpu_reasons(site: Site) -> list[str]:
    depth, width = product(site.depth), product(site.width)
    if same_size(depth, width):
        return []
    if isinstance(depth, int) and isinstance(width, int):
        return []  # padded with zeros to the larger one
    return ["head sizes of query and value differ by a symbolic amount"]


def _cuda_reasons(site: Site) -> list[str]:
    if compute_dtype(site) == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return ["float32 on CUDA: the fused kernels use TF32, which is not allowed here"]
    if compute_dtype(site) == torch.float64:
        return ["float64 on CUDA has no fused kernel"]
    return []


def _varying(site: Site, form: Affine) -> frozenset[Atom]:
    axes: set[Atom] = set()
    for term in (*form.bias, *(f.condition for f in form.fills)):
        axes |= term.axes
    return frozenset(axes & set(site.batch))


def _operand(site: Site, inputs: Inputs, role: str, heads: Heads) -> Tensor:
    """Query, key or value as (batch, heads, rows or columns, depth or width); grouped heads are not repeated."""
    last = {"query": (site.rows, site.depth), "key": (site.columns, site.depth), "value": (site.columns, site.width)}
    shared = heads.heads if role == "query" else heads.shared
    x = inputs.arranged(role, [heads.batch, shared, *last[role]])
    return x if x.stride(-1) == 1 else x.contiguous()


def _scaled(
    site: Site, inputs: Inputs, form: Affine, heads: Heads, q: Tensor, world: RealWorld
) -> tuple[Tensor, float]:
    """A positive number goes to the kernel as its scale; anything else multiplies the query.

    (The kernels multiply by the scale after they have put -inf where a causal mask hides a score.)
    """
    scale = form.scale
    if scale.op == "number" and not isinstance(scale.attr, sympy.Basic):
        return (q, float(scale.attr)) if scale.attr > 0 else (q * float(scale.attr), 1.0)
    if scale.op == "number":
        return q * world.sizes.number(scale.attr), 1.0
    return (q * per_row(site, inputs, heads, scale)[..., None]).to(q.dtype), 1.0


def _mask_world(site: Site, inputs: Inputs, heads: Heads, dtype: torch.dtype) -> RealWorld:
    order = [*heads.batch, *heads.heads, *site.rows, *site.columns]
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return inputs.world(site, order, wide)


def _equal_widths(site: Site, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ATen wants one head size: zeros change neither the scores nor the outputs that are kept."""
    depth, width = product(site.depth), product(site.width)
    if same_size(depth, width):
        return q, k, v
    assert isinstance(depth, int)
    assert isinstance(width, int)
    pad = torch.nn.functional.pad
    if depth > width:
        return q, k, pad(v, (0, depth - width))
    return pad(q, (0, width - depth)), pad(k, (0, width - depth)), v


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, logsumexp


def _other(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float) -> Tensor:
    mask = mask.to(q.dtype) if mask is not None else None
    gqa = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa
    )


def _less_sink(site: Site, inputs: Inputs, heads: Heads, out: Tensor, logsumexp: Tensor) -> Tensor:
    """The sink's share of the denominator taken off."""
    assert site.sink is not None
    share = torch.sigmoid(logsumexp - per_row(site, inputs, heads, site.sink))
    return (out * share[..., None]).to(out.dtype)


def _weighted(site: Site, inputs: Inputs, heads: Heads, out: Tensor) -> Tensor:
    factor = row_factor(site)
    if factor is None or (factor.op == "number" and factor.attr == 1.0):  # None: the kernel drops
        return out
    return (out * per_row(site, inputs, heads, factor)[..., None]).to(out.dtype)
