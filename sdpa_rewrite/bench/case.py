"""One thing to measure, and what it must reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Function = Callable[..., Tensor]
Quantity = Literal["speed", "memory", "peak"]


@dataclass(frozen=True)
class Bar:
    """A demand on ours.

    ``speed``: at least ``bound`` times as fast as ``against``.  ``memory``: at most ``bound`` times its peak memory.
    ``peak``: at least this fraction of the machine's multiply-add peak.
    """

    quantity: Quantity
    bound: float
    against: str = ""

    def __str__(self) -> str:
        if self.quantity == "speed":
            return f"at least {self.bound:.3g}x as fast as {self.against}"
        if self.quantity == "memory":
            return f"at most {self.bound:.3g}x the memory of {self.against}"
        return f"at least {self.bound:.0%} of the peak"


@dataclass(frozen=True)
class Case:
    """Attention, or a model with attention, on given inputs.

    ``inputs`` makes them anew.  ``written`` has the attention written out; ``sdpa`` calls torch's operator in its
    stead; ``flex`` makes from the inputs a function that calls FlexAttention, to be compiled.  ``ours``: which of the
    three our backend is given.
    ``operations``: multiplications and additions of the matrix products, forward and backward.
    """

    suite: str
    form: str
    shape: str
    dtype: torch.dtype
    inputs: Callable[[], list[Tensor]]
    written: Function
    sdpa: Function | None = None
    flex: Callable[..., Function] | None = None
    ours: Literal["written", "sdpa", "flex"] = "written"
    training: bool = False
    compile_sdpa: bool = False
    length: int = 0
    operations: float = 0.0
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        """The case in a line."""
        kind = "training" if self.training else "forward"
        return f"{self.form} {kind} {self.shape} {self.type}"

    @property
    def type(self) -> str:
        """The dtype, as ``float32``."""
        return str(self.dtype).removeprefix("torch.")

    def leaves(self, function: Any, inputs: list[Tensor]) -> list[Tensor]:
        """What gets a gradient when the case is trained."""
        parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
        return [x for x in inputs if x.requires_grad] + parameters
