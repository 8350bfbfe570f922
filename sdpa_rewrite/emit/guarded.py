"""Equality of symbolic sizes that algebra does not see: made sure by a guard.

A window of a padded image has sizes such as ``(n // 4)**2 // (n // 4)``, and no simplifier says that this is
``n // 4``.  Where both sides agree on many values of the symbols, the equality becomes a condition of the compiled
code, as Inductor does with equalities that it needs; were it ever false, torch would compile anew.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from sdpa_rewrite.algebra.axes import Size, same_size

DRAWS = 128
ENOUGH = 4  # draws at which both sides have a value and are equal
LARGEST = 2**12


def equal_sizes(a: Size, b: Size, environment: ShapeEnv | None) -> bool:
    """Whether two sizes are equal whenever the graph runs; ``environment``: that of the graph's symbols."""
    if same_size(a, b):
        return True
    if environment is None or not _guards_hold(environment):
        return False
    if not _agree(sympy.sympify(a), sympy.sympify(b), environment):
        return False
    return bool(environment.evaluate_expr(sympy.Eq(a, b)))


def environment_of(*tensors: Tensor) -> ShapeEnv | None:
    """The environment of the first symbolic size or stride."""
    for x in tensors:
        for n in (*x.shape, *x.stride()):
            if isinstance(n, torch.SymInt):
                found: ShapeEnv | None = n.node.shape_env
                return found
    return None


def _agree(a: sympy.Expr, b: sympy.Expr, environment: ShapeEnv) -> bool:
    """Whether two expressions are equal at random sizes, but for those that the graph's guards exclude already."""
    draw = random.Random(0)
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    equal = 0
    for _ in range(DRAWS):
        values = {s: sympy.Integer(int(2 ** draw.uniform(1, math.log2(LARGEST)))) for s in symbols}
        try:
            if a.xreplace(values) == b.xreplace(values):
                equal += 1
            elif _allowed(values, environment):
                return False
        except ZeroDivisionError:
            continue
    return equal >= ENOUGH


def _allowed(values: Mapping[sympy.Basic, sympy.Integer], environment: ShapeEnv) -> bool:
    """Whether no guard on these symbols alone speaks against these sizes."""
    guards = (guard.expr for guard in environment.guards)
    return all(guard.xreplace(values) != sympy.false for guard in guards if guard.free_symbols <= set(values))


def _guards_hold(environment: ShapeEnv) -> bool:
    """Whether a guard made now is checked before each run: while Dynamo compiles, and not ahead of time."""
    from torch._inductor.virtualized import V

    context = torch._guards.TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    return mode is not None and mode.shape_env is environment and not environment.frozen and not V.aot_compilation
