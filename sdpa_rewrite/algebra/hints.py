"""What symbolic sizes were when the graph was made.  For estimates and guarded decisions, never for a proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor

UNKNOWN = 1024  # positions, where the inputs do not tell

Hints: TypeAlias = "Mapping[sympy.Basic, sympy.Integer]"


def hints_of(tensors: Iterable[Tensor]) -> Hints:
    """The sizes of ``tensors``, and the symbols in them, as far as the first inputs have told them."""
    found: dict[sympy.Basic, sympy.Integer] = {}
    sizes: list[Any] = [n for x in tensors for n in x.shape]
    for size in sizes:
        if not isinstance(size, torch.SymInt):
            continue
        if size.node.hint is not None:
            found[size.node.expr] = sympy.Integer(size.node.hint)
        values = size.node.shape_env.backed_var_to_val
        found |= {s: sympy.Integer(int(values[s])) for s in size.node.expr.free_symbols if s in values}
    return found


def estimated(size: Any, hints: Hints) -> int:
    """A size as a number: a guess where symbols are unknown."""
    if isinstance(size, int):
        return size
    try:
        known = size.xreplace(hints)
        return int(known.xreplace({s: sympy.Integer(UNKNOWN) for s in known.free_symbols}))
    except ZeroDivisionError:  # the guess is one that the program does not allow
        return UNKNOWN
