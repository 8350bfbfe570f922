"""A layer that repeats another is certified once; a layer that only looks like it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import analyse, report
from tests.harness import compiled, same_as_eager

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer(x: Tensor, w: Tensor, mask: Tensor, scale: float = 0.5) -> Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return x + ((q @ k.transpose(-2, -1)) * scale + mask).softmax(-1) @ v


def scaled_otherwise(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    return layer(x, w, mask, 0.25)


def over_rows(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return x + ((q @ k.transpose(-2, -1)) * 0.5 + mask).softmax(-2) @ v


def keys_are_queries(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    q, _, v = (x @ w).chunk(3, -1)
    return x + ((q @ q.transpose(-2, -1)) * 0.5 + mask).softmax(-1) @ v


def clipped(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return x + ((q @ k.transpose(-2, -1)).clamp(max=1.0) * 0.5 + mask).softmax(-1) @ v


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The candidates that were analysed in full."""
    names: list[str] = []
    original = analyse.analysed

    def note(candidate: object, order: object) -> object:
        names.append(candidate.anchor.name)  # type: ignore[attr-defined]
        return original(candidate, order)  # type: ignore[arg-type]

    monkeypatch.setattr(analyse, "analysed", note)
    return names


def run(layers: list[Layer]) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Output and gradients of the layers in a row, in eager float64 and compiled, and the sites' statuses."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 6, 8), *(torch.randn(8, 24) * 0.2 for _ in layers), torch.randn(6, 6)]

    def model(x: Tensor, *rest: Tensor) -> Tensor:
        for each, w in zip(layers, rest[:-1], strict=True):
            x = each(x, w, rest[-1])
        return x

    results = []
    for function, dtype in ((model, torch.float64), (compiled(model), torch.float32)):
        own = [x.to(dtype).requires_grad_(k <= len(layers)) for k, x in enumerate(inputs)]
        with report.collect() as found:
            out = function(*own)
            grads = torch.autograd.grad(out.square().mean(), own[:-1])
        results.append([out.detach(), *grads])
    return results[0], results[1], [o.status for o in found.sites]


def assert_close(expected: list[Tensor], found: list[Tensor]) -> None:
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b.to(torch.float64), a, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


def test_three_equal_layers_are_analysed_once(analysed: list[str]) -> None:
    expected, found, statuses = run([layer, layer, layer])
    assert_close(expected, found)
    assert statuses == ["fused"] * 3
    assert len(analysed) == 1


@pytest.mark.parametrize("other", [scaled_otherwise, over_rows, keys_are_queries, clipped])
def test_a_layer_that_differs_is_analysed_by_itself(other: Layer, analysed: list[str]) -> None:
    expected, found, statuses = run([layer, other, layer])
    assert_close(expected, found)
    assert len(analysed) == 2
    assert statuses[0] == statuses[2] == "fused"


def test_attention_stacked_on_attention(analysed: list[str]) -> None:
    """The second attention reads the first one's output, and its gradient, with nothing between."""

    def bare(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return ((x @ x.transpose(-2, -1)) * 0.5 + mask).softmax(-1) @ x

    torch.manual_seed(0)
    x, mask = torch.randn(2, 6, 8), torch.randn(6, 6)
    exact = x.to(torch.float64).requires_grad_()
    expected = bare(bare(exact, exact, mask.double()), exact, mask.double())
    (wanted,) = torch.autograd.grad(expected.square().sum(), exact)
    own = x.clone().requires_grad_()
    with report.collect() as seen:
        out = compiled(lambda y, m: bare(bare(y, y, m), y, m))(own, mask)
        (grad,) = torch.autograd.grad(out.square().sum(), own)
    assert_close([expected.detach(), wanted], [out.detach(), grad])
    assert [o.status for o in seen.sites] == ["fused", "fused"]


def test_layers_that_differ_in_a_constant_tensor_are_not_alike() -> None:
    """``torch.tensor(number)`` is read as its number: a certificate of one layer says nothing of another number."""

    def layer(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return (q @ k.mT * torch.tensor(scale)).softmax(-1) @ v

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer(layer(q, k, v, 0.3), k, v, 2.5)

    found = same_as_eager(function, *(torch.randn(2, 4, 10, 8) for _ in range(3)), emitters=("fused",))
    assert [o.form.scale for o in found.sites if o.form] == ["0.3", "2.5"]
