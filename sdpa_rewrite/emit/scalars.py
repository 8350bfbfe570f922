"""Terms at one position: what kernels inline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdpa_rewrite.algebra.interpret import POINTWISE
from sdpa_rewrite.algebra.term import Slot, Term

SCALAR: Mapping[str, Callable[..., Tensor]] = {k: f for k, f in POINTWISE.items() if k != "float"}
LEAVES = frozenset({"hole", "index", "number"})


def value_at(term: Term, values: dict[Term, Tensor], leaf: Callable[[Term], Tensor], dtype: torch.dtype) -> Tensor:
    """The value of ``term``, given known ``values`` and those of its leaves; floats are ``dtype``."""
    pending = [term]
    while pending:  # an explicit stack: graphs are deeper than Python's
        top = pending[-1]
        missing = [a for a in top.args if a not in values]
        if top not in values and missing:
            pending.extend(missing)
            continue
        pending.pop()
        if top not in values:
            args = [values[a] for a in top.args]
            values[top] = leaf(top) if top.op in LEAVES else _result(top, args, dtype)
    return values[term]


def _result(term: Term, args: list[Tensor], dtype: torch.dtype) -> Tensor:
    if term.op == "apply":
        target, template = term.attr
        positional, named = pytree.tree_map_only(
            Slot, lambda s: args[s.position], template, is_leaf=lambda x: isinstance(x, Slot)
        )
        return target(*positional, **dict(named))  # type: ignore[no-any-return]
    if term.op == "float":
        return args[0].to(dtype)
    return SCALAR[term.op](*args)


def constant(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number without symbols, as a tensor without dimensions; floats are ``dtype``."""
    if isinstance(value, sympy.Basic):
        value = int(value) if value.is_Integer else float(value)
    kind = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else dtype
    return torch.full((), value, dtype=kind, device=device)
