"""The doors with Inductor's real code generation, which other tests leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.conftest import attention, inputs

pytestmark = pytest.mark.codegen


def test_forward_and_backward_by_the_backend(counted: Callable[[], Counter[str]], strict: None) -> None:
    tensors = inputs(2, 4, 32, 16, requires_grad=True)
    result = torch.compile(attention, backend="sdpa_rewrite", fullgraph=True)(*tensors)
    torch.testing.assert_close(result, attention(*tensors))
    weight = torch.randn_like(result)
    expected = torch.autograd.grad((attention(*tensors) * weight).sum(), tensors)
    torch.testing.assert_close(torch.autograd.grad((result * weight).sum(), tensors), expected)
    assert (counted()["graphs"], counted()["failed"]) == (1, 0)
