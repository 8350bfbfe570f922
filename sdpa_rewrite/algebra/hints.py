"""What symbolic sizes were when the graph was made: for estimates, never for a proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import Size

LONG = 1024
"""What a symbol is taken for where the first inputs do not tell."""

Hints: TypeAlias = "Mapping[sympy.Basic, sympy.Integer]"


def hints_of(tensors: Iterable[Tensor]) -> Hints:
    """The symbols in the sizes of ``tensors``, as far as the first inputs have told them."""
    found: dict[sympy.Basic, sympy.Integer] = {}
    sizes: list[Any] = [n for x in tensors for n in x.shape]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            environment: Any = size.node.shape_env  # which torch 2.14 says may be none: not that of a size
            values = environment.backed_var_to_val
            found |= {s: sympy.Integer(int(values[s])) for s in size.node.expr.free_symbols if s in values}
    return found


def long(hints: Hints, lengths: Iterable[Size]) -> Hints:
    """The hints, with the symbols of these lengths at ``LONG`` or more: what is compiled once meets long inputs too."""
    symbols = {s for n in lengths if isinstance(n, sympy.Basic) for s in n.free_symbols}
    return {**hints, **{s: sympy.Integer(max(LONG, hints.get(s, 0))) for s in symbols}}


def estimated(size: Size, hints: Hints) -> int:
    """A size as a number: a guess where symbols are unknown."""
    if isinstance(size, int):
        return size
    try:
        known = size.xreplace(hints)
        return int(known.xreplace({s: sympy.Integer(LONG) for s in known.free_symbols}))
    except ZeroDivisionError:  # the guess is one that the program does not allow
        return LONG
