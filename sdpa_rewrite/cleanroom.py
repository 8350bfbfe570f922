"""Plain eager evaluation in the middle of a compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def clean_room() -> Iterator[None]:
    """No fake tensors, no tracing, no autocast, no inference mode, tensors on the CPU: real numbers for the proofs."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        yield
