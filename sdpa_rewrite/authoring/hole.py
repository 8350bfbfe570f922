"""The operator that stands for a program while a pattern is traced."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sdpa_rewrite.algebra.term import Term


@functools.cache
def program_op() -> Any:
    """``sdpa_rewrite::program(x, name)``: a pointwise operator that nothing knows, for tracing only."""

    def never(x: Tensor, name: str) -> Tensor:
        raise RuntimeError(f"the program {name} of a pattern has no value of its own")

    torch.library.define("sdpa_rewrite::program", "(Tensor x, str name) -> Tensor", tags=(torch.Tag.pointwise,))
    torch.library.impl("sdpa_rewrite::program", "CompositeExplicitAutograd", never)
    torch.library.register_fake("sdpa_rewrite::program", lambda x, name: torch.empty_like(x))
    return torch.ops.sdpa_rewrite.program.default


def is_program(term: Term) -> bool:
    """Whether ``term`` is the hole of a program."""
    return term.op == "apply" and term.attr[0] is program_op()


def program_name(term: Term) -> str:
    """The parameter that a hole stands for."""
    return str(term.attr[1][0][1])
