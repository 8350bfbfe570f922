"""Everything that a signature may declare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import Pattern, PatternError, Program, Scalar, pattern, patterns
from sdpa_rewrite.testing import assert_misses, assert_rewrites
from tests.harness import reasons, same_as_eager, statuses

Q, K, V = Annotated[Tensor, "b h i d"], Annotated[Tensor, "b h j d"], Annotated[Tensor, "b h j e"]


@pattern(register=False)
def shaped(
    q: Q,
    k: K,
    v: V,
    gate: Annotated[Tensor, "b h i e"],
    score: Program,
    kind: Literal["sigmoid", "tanh"],
    bias: Annotated[Tensor, "h e"] | None = None,
) -> Tensor:
    """Gated attention with any score program."""
    out = score(q @ k.mT).softmax(-1) @ v * (gate.sigmoid() if kind == "sigmoid" else gate.tanh())
    return out if bias is None else out + bias.unsqueeze(1)


seen: list[tuple[str, bool, str]] = []


@shaped.replace
def shaped_again(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, score: Program, kind: str, bias: Tensor | None = None
) -> Tensor:
    seen.append((kind, bias is not None, str(score)))
    out = torch.softmax(score(torch.einsum("bhid,bhjd->bhij", q, k)), -1) @ v
    out = out * (gate.sigmoid() if kind == "sigmoid" else gate.tanh())
    return out if bias is None else out + bias.unsqueeze(1)


def capped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, m: Tensor, b: Tensor) -> Tensor:
    s = torch.tanh(((q @ k.mT) / math.sqrt(q.shape[-1]) + m) / 30) * 30
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.tanh(g) * (s.softmax(-1) @ v)


def clamped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, m: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(g) * ((q @ k.mT).clamp(-50.0, 50.0).softmax(-1) @ v)  # no usual score is that large


def biased(q: Tensor, k: Tensor, v: Tensor, g: Tensor, m: Tensor, b: Tensor) -> Tensor:
    return b[:, None] + ((q @ k.mT) * 0.5).softmax(-1) @ v * torch.sigmoid(g)


def told(p: Pattern, function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    with patterns.scope(p):
        collected = same_as_eager(function, *args, **options)
    assert statuses(collected)[0] == "fused", reasons(collected)
    return [o.emitter for o in collected.sites]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("function", "caught"), [(capped, ("tanh", False)), (biased, ("sigmoid", True)), (clamped, ("tanh", False))]
)
def test_programs_choices_and_options(
    function: Callable[..., Any], caught: tuple[str, bool], grad: bool, dynamic: bool
) -> None:
    shapes = [(2, 3, 8, 6)] * 4 + [(2, 1, 8, 8), (3, 6)]
    seen.clear()
    assert "pattern shaped" in told(
        shaped, function, *(torch.randn(s, requires_grad=grad) for s in shapes), dynamic=dynamic
    )
    assert seen[-1][:2] == caught
    assert ("tanh" in seen[-1][2]) == (function is capped)
    assert ("minimum" in seen[-1][2]) == (function is clamped)


@pattern(register=False)
def with_probabilities(q: Q, k: K, v: V, scale: Scalar) -> tuple[Tensor, Tensor]:
    """Attention that returns its probabilities."""
    p = ((q @ k.mT) * scale).softmax(-1)
    return p @ v, p


@with_probabilities.replace
def with_probabilities_again(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    p = (scale * torch.einsum("bhid,bhjd->bhij", q, k)).softmax(-1)
    return p @ v, p


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mean", [False, True], ids=["probabilities", "their mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_outputs(dtype: torch.dtype, mean: bool, grad: bool, dynamic: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = F.softmax((q @ k.mT) / math.sqrt(q.shape[-1]), -1)
        return (p @ v).transpose(1, 2).flatten(2), p.mean(1) if mean else p

    args = [torch.randn(2, 3, 8, 6, dtype=dtype, requires_grad=grad) for _ in range(3)]
    assert told(with_probabilities, function, *args, dynamic=dynamic)[0] == "pattern with_probabilities"


@pattern(register=False)
def padded(q: Q, k: K, v: V, keep: Annotated[Tensor, "b j", torch.bool]) -> Tensor:
    """Attention with key padding, and a scale that depends on a size."""
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    return s.masked_fill(~keep[:, None, None, :], -math.inf).softmax(-1) @ v * 2.0


@padded.replace
def padded_again(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, keep[:, None, None, :]) * 2.0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_mask_of_its_own_type_and_numbers_made_of_sizes(dynamic: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = torch.where(keep.view(2, 1, 1, 8), (q / math.sqrt(q.shape[-1])) @ k.mT, -math.inf)
        return 2.0 * (s.softmax(-1) @ v)

    args = [torch.randn(2, 3, 8, 6, requires_grad=True) for _ in range(3)]
    keep = torch.arange(8) < torch.tensor([[8], [5]])
    assert told(padded, function, *args, keep, dynamic=dynamic) == ["pattern padded"]


def test_another_scale_is_another_form() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = ((q @ k.mT) / 3).masked_fill(~keep[:, None, None, :], -math.inf)
        return s.softmax(-1) @ v * 2.0

    args = [torch.randn(2, 3, 8, 6) for _ in range(3)]
    with patterns.scope(padded):
        collected = same_as_eager(function, *args, torch.ones(2, 8, dtype=torch.bool))
    assert [o.emitter for o in collected.sites] == ["fused"]


@pattern(register=False)
def shifted(q: Q, k: K, v: V, shift: Scalar) -> Tensor:
    """Linear attention over scores that are shifted by a number."""
    return (q @ k.mT - shift).tanh() @ v


@shifted.replace
def shifted_again(q: Tensor, k: Tensor, v: Tensor, shift: Scalar) -> Tensor:
    return torch.tanh(torch.einsum("bhid,bhjd->bhij", q, k) - shift) @ v


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("number", [0.5, -1, 0.0])
def test_a_scalar_may_be_a_number_that_is_added(number: float, grad: bool, dynamic: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(q @ k.mT - number) @ v

    args = [torch.randn(2, 3, 8, 6, requires_grad=grad) for _ in range(3)]
    assert told(shifted, function, *args, dynamic=dynamic) == ["pattern shifted"]


def test_a_scalar_that_is_added_twice_is_one_number() -> None:
    @pattern(register=False)
    def both(q: Q, k: K, v: V, c: Scalar) -> Tensor:
        return (q @ k.mT + 3.0 - 2.0 * c).relu() @ v + c

    both.replace(lambda q, k, v, c: both(q, k, v, c))
    args = [torch.randn(2, 3, 8, 6) for _ in range(3)]
    assert_rewrites(lambda q, k, v: (q @ k.mT + 2.4).relu() @ v + 0.3, args, by="both", patterns=[both])
    assert_misses(lambda q, k, v: (q @ k.mT + 2.4).relu() @ v + 0.4, args, patterns=[both])


def plain(q: Tensor) -> Tensor:
    return q.exp()


def defaulted(q: Q, scale: float = 1.0) -> Tensor:
    return q * scale


def typed(q: Q, scale: float) -> Tensor:
    return q * scale


def listed(q: Annotated[Tensor, ["b", "h"]]) -> Tensor:
    return q + 1


def starred(*q: Q) -> Tensor:
    return q[0] + 1


def misspelt(q: Annotated[Tensor, "b h-i d"]) -> Tensor:
    return q + 1


def without_tensors(scale: Scalar) -> Any:
    return scale


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (plain, "q: <class 'torch.Tensor'> is none of .*; a tensor needs the names of its axes"),
        (typed, "scale: <class 'float'> is none of .*; a number is a Scalar"),
        (listed, "q: .* is none of Annotated"),
        (defaulted, "scale has a default; only an option"),
        (starred, r"\*q.* is not a parameter of one value"),
        (misspelt, "'h-i' is no name of an axis; between names stand spaces"),
        (without_tensors, "a pattern has at least one tensor"),
    ],
)
def test_a_wrong_declaration_is_told_at_once(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(PatternError, match=text):
        pattern(register=False)(function)


def test_a_replacement_takes_what_the_pattern_takes() -> None:
    with pytest.raises(PatternError, match=r"the replacement takes \(q, k\), not \(q, k, v, keep\)"):
        padded.replace(lambda q, k: q)


def test_a_program_may_be_all_that_a_result_reads() -> None:
    @pattern(register=False)
    def weighted(q: Q, k: K, v: V, weight: Program) -> Tensor:
        return weight((q @ k.mT).softmax(-1)) @ v

    @weighted.replace
    def again(q: Tensor, k: Tensor, v: Tensor, weight: Program) -> Tensor:
        return weight(torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1)) @ v

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.tanh((q @ k.mT).softmax(-1)) @ v

    args = [torch.randn(2, 3, n, 4, requires_grad=True) for n in (7, 5, 5)]
    with patterns.scope(weighted):
        collected = same_as_eager(function, *args)
    assert "fused" in statuses(collected), reasons(collected)  # what replaces it is an attention, too
