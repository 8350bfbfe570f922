"""A site in words."""

from __future__ import annotations

import math

import sympy
import torch
from torch.fx import Node

from sdpa_rewrite import config
from sdpa_rewrite.algebra.axes import Size, product
from sdpa_rewrite.algebra.hints import Hints, estimated, hints_of
from sdpa_rewrite.algebra.term import Term, show, subterms
from sdpa_rewrite.emit.affine import Affine, NotAffine, affine
from sdpa_rewrite.emit.base import dtype_of
from sdpa_rewrite.lift.ops import is_drawn_mask
from sdpa_rewrite.outcome import Form
from sdpa_rewrite.site import Site

READABLE = 24
"""Characters of a symbolic size that is shown as it is; of a longer one, what it was for the first inputs."""


def form_of(site: Site) -> Form:
    """What was recognised, in words."""
    try:
        form: Affine | None = affine(site)
    except NotAffine:
        form = None
    return Form(
        scale=_scale(form) if form is not None else "inside the score program",
        mask=_mask(site, form),
        score=_modifiers(site),
        weight=_weight(site),
        softmax=site.softmax + (" with sink" if site.sink is not None else ""),
        gqa=_groups(site),
        dropout=dropout(site),
        shape=_shape(site),
        dtype=str(dtype_of(site.query)).removeprefix("torch."),
        gradients=tuple(sorted({g.role for g in site.gradients})),
    )


def disabled(form: Form, training: bool) -> str:
    """The entry of ``config.disabled_forms`` that fits this site; empty when none does."""
    words = [form.mask, *form.score, *form.weight, form.softmax, form.gqa, form.dtype]
    words += ["dropout"] * bool(form.dropout) + ["grouped"] * bool(form.gqa)
    words.append("training" if training else "inference")
    return next((entry for entry in config.disabled_forms if any(entry in word for word in words)), "")


def _scale(form: Affine) -> str:
    if form.scale.op == "number":
        value = form.scale.attr
        return str(value) if isinstance(value, sympy.Basic) else f"{value:g}"
    return f"tensor {show(form.scale, 3)}"


def _mask(site: Site, form: Affine | None) -> str:
    if form is None:
        return "in the score program"
    parts = [p.describe() for p in form.predicates]
    holes = [t for t in (*form.bias, *(f.condition for f in form.fills)) if any(h.op == "hole" for h in subterms(t))]
    names = {a: n for n, dim in (("row", site.rows), ("column", site.columns)) for a in dim}
    for term in holes:
        over = sorted({names.get(a, "batch/head") for a in term.axes})
        kind = "key padding" if over in (["column"], ["batch/head", "column"]) else "tensor over " + ", ".join(over)
        parts.append(kind)
    return " and ".join(dict.fromkeys(parts)) or "none"


def _modifiers(site: Site) -> tuple[str, ...]:
    names = {t.op if t.op != "apply" else str(t.attr[0]) for t in subterms(site.score)}
    known = {"tanh": "soft-cap", "maximum": "clamped below", "minimum": "clamped above"}
    plain = {"add", "mul", "hole", "number", "where", "index", "le", "lt", "not", "and", "or", "float", "int", "bool"}
    return tuple(sorted(known.get(n, n) for n in names - plain - {"eq", "ne", "div", "leaf"}))


def _weight(site: Site) -> tuple[str, ...]:
    if site.weight.op == "hole":
        return ()
    return ("dropout",) if dropout(site) else (show(site.weight, 4),)


def dropout(site: Site) -> float:
    """The probability of ``p * (rand > p) / (1 - p)`` or of ``native_dropout``; 0 for any other weight program."""
    for term in subterms(site.weight):
        if term.op == "lt" and term.args[0].op == "number":
            return float(term.args[0].attr)
    mask = drawn_mask(site)
    if mask is not None:
        return float(mask.args[0].args[1])  # type: ignore[union-attr,arg-type]
    for capture in site.captures:
        rate = _rate(capture.term)
        if rate:
            return rate
    return 0.0


def drawn_mask(site: Site) -> Node | None:
    """The mask of ``native_dropout`` that the site reads, if it does."""
    return next((c.operand.node for c in site.captures if is_drawn_mask(c.operand.node)), None)


def _rate(term: Term) -> float:
    for t in subterms(term):
        if t.op == "lt" and t.args[0].op == "number" and t.args[1].op == "leaf":
            node = t.args[1].attr[0]
            if "rand" in str(node.target):
                return float(t.args[0].attr)
    return 0.0


def _groups(site: Site) -> str:
    shared = [a for a in site.batch if a in site.key.axes]
    group = [a for a in site.batch if a not in site.key.axes and a not in site.value.axes]
    if not group:
        return ""
    return f"{product(group)} query heads per key head" if shared else f"one key head for {product(group)}"


def _shape(site: Site) -> str:
    known = hints_of(o.node.meta["val"] for o in (site.query, site.key))
    batch = " x ".join(_shown(a.size, known) for a in site.batch) or "1"
    rows, columns, depth = (_shown(product(d), known) for d in (site.rows, site.columns, site.depth))
    return f"batch {batch}, {rows} x {columns}, head size {depth}"


def _shown(size: Size, known: Hints) -> str:
    text = str(size)
    return text if len(text) <= READABLE else f"~{estimated(size, known)}"


def bytes_avoided(site: Site) -> int:
    """The N x N tensors of the unfused program that live at once: probabilities, and in training what is saved."""
    known = hints_of(o.node.meta["val"] for o in (site.query, site.key))
    positions = math.prod(estimated(a.size, known) for a in (*site.batch, *site.rows, *site.columns))
    if not isinstance(site.scores_node.meta["val"], torch.Tensor):
        return 0  # a call that made none
    itemsize = site.scores_node.meta["val"].element_size()
    return int(positions * itemsize * (2 if site.training else 1))
