"""The ``flex`` emitter: torch's FlexAttention.

Any pointwise score program becomes its ``score_mod``, which Inductor inlines into the kernel: Triton's, forward and
backward, on CUDA and XPU; a C++ template on CPU, for inference only.  What the kernels mean otherwise than as written
is put right at O(rows) cost:

- They give 0 for a row whose logits are all -inf, where softmax gives NaN.  The logsumexp tells such rows; on CPU,
  where there is none, the masks do.
- A sink takes its share of the denominator by way of the logsumexp; on CPU it is a column of its own.
"""

from __future__ import annotations

import math

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Dims, product, same_size
from sdpa_rewrite.algebra.term import Term, contains, subterms
from sdpa_rewrite.emit import flex_call
from sdpa_rewrite.emit.base import Inputs, compute_dtype, device_of, dtype_of, inlines
from sdpa_rewrite.emit.buffer_op import buffer
from sdpa_rewrite.emit.dropout import dropout_rate
from sdpa_rewrite.emit.emptiness import Unclear, empty_row
from sdpa_rewrite.emit.heads import Heads, heads_of
from sdpa_rewrite.emit.rows import logit_dtype, per_row, row_factor
from sdpa_rewrite.emit.scalars import SCALAR
from sdpa_rewrite.emit.scale import finite_number, leading_factor
from sdpa_rewrite.emit.score_mod import Program
from sdpa_rewrite.lift.ops import LAYOUT, opname
from sdpa_rewrite.site import Site

HALVES = (torch.bfloat16, torch.float16)
CPU_BLOCKS = (64, 512)  # rows, columns; columns above 128 keep torch off its decoding kernel, which needs full blocks
NARROWEST, WIDEST = 16, 256  # head sizes of the Triton kernels
INFINITY = float("inf")
DEEP = 100.0  # a logit so far down costs digits of a logsumexp
GIANT = 1e37  # log2(e) times it is still finite


class Flex:
    """FlexAttention's kernels."""

    name = "flex"

    def reasons_against(self, site: Site) -> list[str]:
        """Why FlexAttention cannot take the site."""
        kind = device_of(site).type
        if kind not in ("cpu", "cuda", "xpu"):
            return [f"FlexAttention has no kernel for {kind}"]
        reasons = [*_type_reasons(site), *_program_reasons(site)]
        return reasons + (_cpu_reasons(site) if kind == "cpu" else _gpu_reasons(site))

    def prepared(self, site: Site) -> Site:
        """As it is."""
        return site

    def emit(self, site: Site, inputs: Inputs) -> tuple[Tensor, Dims]:
        """Call the kernel; the output has the dimensions batch, heads, rows, width."""
        with torch.set_grad_enabled(site.training):
            run = _on_cpu if device_of(site).type == "cpu" else _on_gpu
            out = run(site, inputs, heads_of(site))
        heads = heads_of(site)
        factor = row_factor(site)
        if factor is not None and factor is not site.terms.number(1.0):
            out = out * per_row(site, inputs, heads, factor)[..., None]
        return out.to(dtype_of(site.result)), (heads.batch, heads.heads, site.rows, site.width)


def _on_cpu(site: Site, inputs: Inputs, heads: Heads) -> Tensor:
    score, scale, factor = _split_scale(site)
    q, k, v = _operands(site, inputs, heads, factor)
    program = Program(site, heads, score, site.sink, in_memory=True, dtype=logit_dtype(inputs))
    program.read(inputs)
    if site.sink is not None:
        k, v = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (k, v))
    blocks = flex_call.all_blocks(q, k, CPU_BLOCKS)
    q, k, v = (buffer(x, "operand") for x in (q, k, v))
    out, _ = flex_call.flex_attention(q, k, v, _function(program), tuple(program.buffers), scale, blocks)
    out = buffer(out, "result")
    empty = empty_row(site) if site.softmax == "softmax" else None
    if empty is None:
        return out
    return torch.where(per_row(site, inputs, heads, empty)[..., None], math.nan, out)


def _on_gpu(site: Site, inputs: Inputs, heads: Heads) -> Tensor:
    score, scale, factor = _split_scale(site)
    q, k, v = _operands(site, inputs, heads, factor)
    program = Program(site, heads, score, None, log2=_may_reach(site, GIANT), dtype=logit_dtype(inputs))
    program.read(inputs)
    if site.training and _may_reach(site, DEEP):
        program.subtract(_row_shift(site, inputs, heads))
    wanted = site.sink is not None or (site.softmax == "softmax" and _may_be_empty(site))
    out, logsumexp = flex_call.flex_attention(
        q, k, v, _function(program), tuple(program.buffers), scale, logsumexp=wanted
    )
    if logsumexp is None:
        return out
    if site.sink is None:
        # A factor, and not `where`: the gradient of such a row is NaN too.
        return out * torch.where(logsumexp == -INFINITY, math.nan, 1.0)[..., None].detach().to(out.dtype)
    share = torch.sigmoid(logsumexp - per_row(site, inputs, heads, site.sink))
    if site.softmax == "safe":
        share = torch.where(logsumexp == -INFINITY, 0.0, share)
    return out * share[..., None]


def _row_shift(site: Site, inputs: Inputs, heads: Heads) -> Tensor:
    """The largest logit that the masks leave in a row, where that is far down; else 0.

    The backward recomputes probabilities from the logsumexp, which cannot hold both a logit of -1e9 and the logarithm
    of the number of keys.
    """
    hole = site.terms.hole("score", site.scores_axes)
    masks = site.terms.substitute(site.score, {hole: site.terms.number(0.0)})
    top = per_row(site, inputs, heads, site.terms.reduce("amax", masks, site.columns)).detach()
    return torch.where((top < -DEEP) & (top > -INFINITY), top, 0.0)


def _function(program: Program) -> flex_call.ScoreMod:
    return lambda *args: program(*args)


def _operands(site: Site, inputs: Inputs, heads: Heads, factor: Term | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, times ``factor``, key and value as (batch, heads, rows or columns, depth or width).

    Grouped heads are not repeated.
    """
    dtype = compute_dtype(site)
    q = inputs.arranged("query", [heads.batch, heads.heads, site.rows, site.depth])
    k = inputs.arranged("key", [heads.batch, heads.shared, site.columns, site.depth])
    v = inputs.arranged("value", [heads.batch, heads.shared, site.columns, site.width])
    if factor is not None:
        q = q * per_row(site, inputs, heads, factor)[..., None]
    q, k, v = (_dense(x.to(dtype)) for x in (q, k, v))
    return q, k, v


def _dense(x: Tensor) -> Tensor:
    """The kernels want the last dimension dense, and derive their output's strides from the query's."""
    repeated = any(isinstance(s, int) and s == 0 for s in x.stride())
    return x.contiguous() if repeated or x.stride(-1) != 1 else x


def _split_scale(site: Site) -> tuple[Term, float, Term | None]:
    """The score program without the factor that the score is multiplied by first, and that factor.

    A plain number goes to the kernel.  A symbolic one, and one that is learned, multiplies the query.
    """
    split = leading_factor(site)
    if split is None:
        return site.score, 1.0, None
    rest, factor = split
    number = finite_number(factor)
    if number is not None:
        return rest, number, None
    symbolic = factor.op == "number" and isinstance(factor.attr, sympy.Basic)
    learned = (
        site.training
        and not factor.axes & set(site.columns)
        and factor is not site.terms.hole("score", site.scores_axes)
    )
    return (rest, 1.0, factor) if symbolic or learned else (site.score, 1.0, None)


# -- reasons -------------------------------------------------------------------------------------------------


def _type_reasons(site: Site) -> list[str]:
    reasons = []
    if compute_dtype(site) not in (torch.float32, *HALVES):
        reasons.append(f"FlexAttention does not compute in {compute_dtype(site)}")
    sizes = [*(a.size for a in site.batch), *(product(d) for d in (site.rows, site.columns, site.depth, site.width))]
    if any(same_size(n, 0) for n in sizes):
        reasons.append("an empty dimension")
    return reasons


def _programs(site: Site) -> list[Term]:
    return [site.score] if site.sink is None else [site.score, site.sink]


def _program_reasons(site: Site) -> list[str]:
    reasons = []
    if row_factor(site) is None:
        what = "by a weight program" if dropout_rate(site) is None else "by dropout"
        reasons.append(f"the probabilities are changed after the softmax ({what})")
    for term in dict.fromkeys(t for program in _programs(site) for t in subterms(program)):
        if term.op == "apply" and not inlines(term.attr[0]):
            reasons.append(f"the score program applies {term.attr[0]}, which a kernel cannot inline")
        elif term.op not in ("apply", "hole", "number", "index", "float", *SCALAR):
            reasons.append(f"the score program is not pointwise: {term.op}")
    return reasons


def _cpu_reasons(site: Site) -> list[str]:
    if site.training:
        return ["FlexAttention has no backward on CPU"]
    if not flex_call.runs_on_cpu():
        return ["FlexAttention has no kernel for this CPU (it needs AVX2)"]
    reasons = []
    if any(_symbolic(n) for n in _read(site)):
        reasons.append("the score program reads a tensor of symbolic shape, on CPU")
    operands = [_base(o.node) for o in (site.query, site.key, site.value)]
    if any(_base(n) in operands for n in _read(site)):
        reasons.append("the score program reads a tensor that query, key or value are part of, on CPU")
    if len(set(operands)) < 3 and not flex_call.separates_shared_buffers():
        reasons.append("query, key and value are parts of one tensor, which this torch confuses on CPU")
    try:
        if site.softmax == "softmax":
            empty_row(site)
    except Unclear as error:
        reasons.append(str(error))
    return reasons


def _read(site: Site) -> list[Node]:
    """The nodes that the kernel itself reads."""
    used = {t.attr for program in _programs(site) for t in subterms(program) if t.op == "hole"}
    return [c.operand.node for c in site.captures if c.name in used]


def _symbolic(node: Node) -> bool:
    return any(not isinstance(n, int) for n in node.meta["val"].shape)


def _base(node: Node) -> Node:
    """The tensor that ``node`` is a view of."""
    while node.op == "call_function" and (_is_view(node) or opname(node) == "getitem"):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(a.alias_info is not None for a in schema.arguments)
    return bool(node.all_input_nodes) and (aliases or opname(node) in LAYOUT)


def _gpu_reasons(site: Site) -> list[str]:
    reasons = []
    for name, dim in (("query", site.depth), ("value", site.width)):
        size = product(dim)
        if not isinstance(size, int):
            reasons.append(f"the head size of the {name} is symbolic")
        elif not NARROWEST <= size <= WIDEST:
            reasons.append(f"the head size of the {name} is {size}, not within {NARROWEST} to {WIDEST}")
    if not isinstance(product(heads_of(site).group), int):
        reasons.append("the number of query heads per key head is symbolic")
    if site.training and _may_reach(site, DEEP) and _condition_reads_score(site):
        reasons.append("which scores are masked depends on the scores")
    if site.training and _scaled_by_tensor(site):
        reasons.append("scores are multiplied by a tensor: logits as large as it may hold cost the backward its digits")
    learned = {g.role for g in site.gradients} - {"query", "key", "value"}
    holes = {t for t in subterms(_split_scale(site)[0]) if t.op == "hole" and t.attr in learned}
    for hole in holes:
        if not hole.axes & set(site.rows) or not hole.axes & set(site.columns):
            reasons.append("a tensor that all rows or all columns share needs a gradient: additions to few cells")
    return reasons


def _condition_reads_score(site: Site) -> bool:
    hole = site.terms.hole("score", site.scores_axes)
    return any(t.op == "where" and contains(t.args[0], hole) for t in subterms(site.score))


def _scaled_by_tensor(site: Site) -> bool:
    score, hole = _split_scale(site)[0], site.terms.hole("score", site.scores_axes)
    read = {c.name for c in site.captures if dtype_of(c.operand).is_floating_point}

    def reads(term: Term) -> bool:
        return any(t.op == "hole" and t.attr in read for t in subterms(term))

    products = [t for t in subterms(score) if t.op in ("mul", "div") and contains(t, hole)]
    return any(reads(a) for t in products for a in t.args if not contains(a, hole))


def _may_be_empty(site: Site) -> bool:
    try:
        return empty_row(site) is not None
    except Unclear:
        return True


def _may_reach(site: Site, depth: float) -> bool:
    """Whether a mask may bring a logit down to -depth."""
    for term in subterms(site.score):
        value = term.attr if term.op == "number" else None
        if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) >= depth:
            return True
        if isinstance(value, sympy.Basic):
            return True
    return any(n.meta["val"].dtype.is_floating_point for n in _read(site))
