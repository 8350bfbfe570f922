"""What authors of patterns reported, as the API answers it (the table in CASES is named in each test)."""

from __future__ import annotations

import math
import pickle
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import Match, NoMatch, Pattern, Scalar, config, explain, pattern, patterns
from sdpa_rewrite.graph_pass import AttentionPass, registered_patterns_key
from sdpa_rewrite.rewrite import Refused
from sdpa_rewrite.testing import assert_misses, assert_rewrites, compare, record_graphs
from tests.authoring import forms

Q, K, V = Annotated[Tensor, "b h i d"], Annotated[Tensor, "b h j d"], Annotated[Tensor, "b h j e"]


@pytest.mark.parametrize("scale", [1.0, 0.25, 7.0, -0.5])
def test_a1_a_scalar_is_any_number(scale: float) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return ((q @ k.mT) * scale).softmax(-1) @ v * g.sigmoid()

    assert_rewrites(function, forms.tensors(grad=True), by="gated", patterns=[forms.gated])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("grad", [False, True])
def test_a2_one_pattern_serves_all(dtype: torch.dtype, batch: int, grad: bool) -> None:
    assert_rewrites(forms.scaled_query, forms.tensors(batch, grad, dtype), by="gated", patterns=[forms.gated])


@pattern(register=False)
def two_outputs(q: Q, k: K, v: V, out: Annotated[Tensor, "b h i e"]) -> tuple[Tensor, Tensor]:
    """An argument named out is an argument, and results keep their places."""
    o = (q @ k.mT).softmax(-1) @ v
    return o + out, o - out


@two_outputs.replace
def two_outputs_again(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    o = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return o + out, o - out


def test_a3_no_traps_in_names_and_outputs() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        o = (q @ k.mT).softmax(-1) @ v
        return g + o, o - g

    assert_rewrites(function, forms.tensors(), by="two_outputs", patterns=[two_outputs])


def test_a4_the_nearest_pattern_is_named_with_what_is_in_its_way() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.3).softmax(1) @ v * g.sigmoid()  # over the heads

    with patterns.scope(forms.gated):
        report = explain(function, *forms.tensors())
    text = str(report)
    assert "nearest pattern: gated" in text
    assert "of it found" in text
    assert "forms.py" in text


def test_a4_a_replacement_that_is_wrong_is_refused_with_the_difference() -> None:
    @pattern(register=False)
    def doubled(q: Q, k: K, v: V) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v * 2.0

    @doubled.replace
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v * 2.5

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).relu().softmax(-1) @ v * 2.0 if False else (q @ k.mT).softmax(-1) @ v * 2.0

    with config.patch(emitters=()):
        told = assert_misses(function, forms.tensors()[:3], reason="differs from the pattern's by", patterns=[doubled])
    assert "result 0" in str(told)


def test_a4_a_wrong_gradient_is_refused_too() -> None:
    @pattern(register=False)
    def tripled(q: Q, k: K, v: V) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v * 3.0

    @tripled.replace
    def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT.detach()).softmax(-1) @ v * 3.0

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v * 3.0

    with config.patch(emitters=()):
        reason = "the gradient of k: only the pattern has one"
        assert_misses(function, forms.tensors(grad=True)[:3], reason=reason, patterns=[tripled])


class Clipped(torch.autograd.Function):
    """The identity, whose gradient is changed, but only far away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.way = way
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (g * (x.abs() < 1000) if ctx.way == "zero" else g * (1 + torch.floor(x.abs() / 1000))), None


@pytest.mark.parametrize("way", ["zero", "steps"])
@pytest.mark.parametrize("where", ["scores", "gate"])
def test_a_gradient_that_is_changed_far_away_only_is_no_gradient_of_the_pattern(where: str, way: str) -> None:
    def clipped(name: str, x: Tensor) -> Tensor:
        made: Tensor = Clipped.apply(x, way) if name == where else x
        return made

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return clipped("scores", (q @ k.mT) * 0.5).softmax(-1) @ v * clipped("gate", g * 500).sigmoid()

    with config.patch(emitters=()):
        wide = [(10 * x).requires_grad_() for x in forms.tensors()]
        told = compare(function, wide, patterns=[forms.gated])
    # the gate's gradient is the pattern's up to where it is clipped
    assert [o.status for o in told.sites] == ["missed" if where == "scores" else "fused"]


def test_a5_a_replacement_that_does_not_fit_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def misfit(*_: Any, **__: Any) -> None:
        raise Refused("it does not fit")

    monkeypatch.setattr("sdpa_rewrite.rewrite.check", misfit)
    with record_graphs() as graphs, config.patch(emitters=()):
        assert_misses(forms.plain, forms.tensors(grad=True), reason="it does not fit", patterns=[forms.gated])
    assert len(graphs.before) == 1
    assert graphs.before == graphs.after


def test_a6_scopes_are_scoped_and_registrations_removable() -> None:
    with patterns.scope(forms.gated):
        assert forms.gated in patterns.active()
        with config.patch(disabled_patterns=("gated",)):
            assert forms.gated not in patterns.active()
    assert forms.gated not in patterns.active()
    patterns.register(forms.gated)
    assert forms.gated in patterns.active()
    patterns.unregister("gated")
    assert forms.gated not in patterns.active()


def test_a7_the_key_covers_the_source_of_patterns() -> None:
    def made(factor: float) -> Pattern:
        @pattern(register=False, name="scaled")
        def scaled(q: Q, k: K, v: V) -> Tensor:
            return (q @ k.mT).softmax(-1) @ v * factor

        return scaled

    plain, uuid = registered_patterns_key(), AttentionPass().uuid()
    keys = []
    for factor in (2.0, 2.0, 3.0):
        with patterns.scope(made(factor)):
            keys.append(registered_patterns_key())
            assert AttentionPass().uuid() != uuid
    assert keys[0] == keys[1] != keys[2]
    assert registered_patterns_key() == plain
    assert AttentionPass().uuid() == uuid


def test_a7_patterns_pickle_by_where_they_stand() -> None:
    assert pickle.loads(pickle.dumps(forms.gated)) is forms.gated


def test_m5_a_mask_is_any_tensor_that_broadcasts() -> None:
    buffer = torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)

    @pattern(register=False)
    def masked(q: Q, k: K, v: V, mask: Annotated[Tensor, "b h i j"], scale: Scalar) -> Tensor:
        return ((q @ k.mT) * scale).masked_fill(mask == 0, -math.inf).softmax(-1) @ v

    @masked.replace
    def again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask != 0, scale=scale)

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        s = (q @ k.mT) / math.sqrt(q.shape[-1])
        return s.masked_fill(mask[:, :, : s.shape[-2], : s.shape[-1]] == 0, -math.inf).softmax(-1) @ v

    args = [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
    assert_rewrites(function, [*args, buffer], by="masked", patterns=[masked])


def test_m12_a_mask_that_is_constant_is_none() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        s = (q @ k.mT) * 0.5 + torch.zeros(2, 1, q.shape[-2], k.shape[-2])
        return s.softmax(-1) @ v * g.sigmoid()

    assert_rewrites(function, forms.tensors(), by="gated", patterns=[forms.gated])


def test_w1_the_right_tensor_is_bound_whatever_the_layout() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        k = k.transpose(1, 2).permute(0, 2, 3, 1)  # (B, H, D, T) at once, multiplied as it is
        return ((q @ k) * 0.4).softmax(-1) @ v * g.sigmoid()

    square = [torch.randn(2, 4, 4, 4, requires_grad=True) for _ in range(4)]
    assert_rewrites(function, square, by="gated", patterns=[forms.gated])


def test_a_check_says_no_with_the_culprit() -> None:
    @pattern(register=False, dtypes=(torch.float32,))
    def picky(q: Q, k: K, v: V) -> Tensor:
        return (q @ k.mT).sigmoid() @ v * 2.0

    @picky.replace
    def same(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).sigmoid() @ v * 2.0

    @picky.check
    def wants_training(m: Match) -> None:
        assert m.sizes["d"] == 4
        if not m["q"].requires_grad:
            raise NoMatch("q needs no gradient", at=m["q"])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).sigmoid() @ v * 2.0

    assert_misses(function, forms.tensors()[:3], reason="q needs no gradient [q at", patterns=[picky])
    assert_rewrites(function, forms.tensors(grad=True)[:3], by="picky", patterns=[picky])
    half = forms.tensors(grad=True, dtype=torch.bfloat16)[:3]
    assert_misses(function, half, reason="q is torch.bfloat16, not torch.float32", patterns=[picky])


def test_the_higher_priority_wins() -> None:
    def made(name: str, priority: int) -> Pattern:
        @pattern(register=False, name=name, priority=priority)
        def one(q: Q, k: K, v: V) -> Tensor:
            return (q @ k.mT).tanh() @ v

        one.replace(lambda q, k, v: torch.einsum("bhij,bhje->bhie", torch.tanh(q @ k.mT), v))
        return one

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).tanh() @ v

    both = [made("low", 1), made("high", 2)]
    assert_rewrites(function, forms.tensors()[:3], by="high", patterns=both)
    assert_rewrites(function, forms.tensors()[:3], by="high", patterns=both[::-1])


def sfdp(query: Any, key: Any, value: Any, inv_scale: Any) -> Any:
    """The equation of pytorch's first pattern, with a scale factor."""
    return torch.matmul(query, key.transpose(-2, -1)).div(inv_scale).softmax(dim=-1).matmul(value)


def sfdp_replacement(query: Any, key: Any, value: Any, inv_scale: Any) -> Any:
    return F.scaled_dot_product_attention(query, key, value, scale=1.0 / inv_scale)


def test_a_pattern_of_register_replacement_is_adopted() -> None:
    example = [torch.empty(2, 4, 8, 16)] * 3
    adopted = patterns.adopt(
        sfdp, sfdp_replacement, example, scalar_workaround={"inv_scale": 8}, register=False, extra_check=few_heads
    )

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) / 3.0).softmax(-1) @ v

    assert_rewrites(function, forms.tensors(grad=True)[:3], by="sfdp", patterns=[adopted])
    many = [torch.randn(2, 9, 5, 4) for _ in range(3)]
    with config.patch(emitters=()):
        assert_misses(lambda q, k, v: ((q @ k.mT) / 3.0).softmax(-1) @ v * 1.0, many, patterns=[adopted])


def few_heads(match: Any) -> bool:
    return bool(match.kwargs["query"].meta["val"].shape[1] < 8)
