"""Forms at which others crash (table C of the cases people reported), dropout (D1), and authors' pains (A5 to A7)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import config, report
from sdpa_rewrite.graph_pass import AttentionPass, PassChain
from tests.harness import compiled, reasons, same_as_eager, statuses
from tests.test_cases_missed import qkv

SCALES = {
    "a number in a tensor": torch.tensor(0.3),
    "per head": 0.4 + torch.rand(4, 1, 1),
    "per query": 0.4 + torch.rand(2, 1, 6, 1),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("way", [torch.mul, torch.div])
def test_C1_a_scale_that_is_a_tensor(way: Callable[..., Tensor], scale: Tensor, grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return way(q @ k.transpose(-2, -1), c).softmax(-1) @ v

    told = same_as_eager(attention, *qkv(grad=grad), scale.clone().requires_grad_(grad))
    assert statuses(told) == ["fused"]


def test_C1_a_learned_temperature_and_a_mask_in_half_precision() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, t: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * t.exp()
        return scores.masked_fill(~keep, -math.inf).softmax(-1) @ v

    t = torch.tensor(-1.0, dtype=torch.bfloat16, requires_grad=True)
    told = same_as_eager(attention, *qkv(dtype=torch.bfloat16, grad=True), t, torch.ones(6, 6).tril().bool())
    assert statuses(told) == ["fused"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("way", ["add", "fill", "multiply"])
def test_C2_a_mask_of_whole_numbers(way: str, dtype: torch.dtype) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3
        if way == "add":
            return (scores + m).softmax(-1) @ v
        if way == "fill":
            return scores.masked_fill(m == 0, -math.inf).softmax(-1) @ v
        return (scores + (1.0 - m.to(scores.dtype)) * -1e4).softmax(-1) @ v

    mask = (torch.rand(2, 1, 1, 6) > 0.3).to(dtype)
    mask[..., 0] = 1
    told = same_as_eager(attention, *qkv(grad=True), mask)
    assert statuses(told) == ["fused"]


def largest_new_tensor(graphs: list[torch.fx.GraphModule]) -> int:
    """Elements of the largest tensor that a graph computes and that is no view."""
    views = ("expand", "view", "permute", "unsqueeze", "squeeze", "slice", "transpose")
    sizes = [
        n.meta["val"].numel()
        for g in graphs
        for n in g.graph.nodes
        if n.op == "call_function"
        and isinstance(n.meta.get("val"), Tensor)
        and not any(v in str(n.target) for v in views)
    ]
    return max(sizes)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 32), (32, 32), (1, 1, 32, 32), (2, 1, 32, 32), (1, 4, 32, 32), (2, 4, 1, 1)]
)
def test_C3_broadcasts_stay_broadcasts(shape: tuple[int, ...], grad: bool) -> None:
    """Nothing of batch x heads x queries x keys is made of a bias that does not vary along all of them."""

    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3 + m).softmax(-1) @ v

    graphs: list[torch.fx.GraphModule] = []
    told = same_as_eager(attention, *qkv(s=32, d=2, grad=grad), torch.randn(shape), keep=graphs)
    assert statuses(told) == ["fused"]
    assert largest_new_tensor(graphs) < 2 * 4 * 32 * 32


@pytest.mark.parametrize("grad", [False, True])
def test_C3_an_expanded_and_a_misaligned_bias(grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3 + m).softmax(-1) @ v

    expanded = torch.randn(2, 1, 1, 6).expand(2, 4, 6, 6)
    misaligned = torch.randn(2, 4, 6, 13)[..., 3:9]
    for bias in (expanded, misaligned):
        assert statuses(same_as_eager(attention, *qkv(grad=grad), bias)) == ["fused"]


def test_C4_the_bias_alone_needs_a_gradient() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3 + m).softmax(-1) @ v

    told = same_as_eager(attention, *qkv(), torch.randn(4, 6, 6, requires_grad=True))
    assert statuses(told) == ["fused"]
    told = same_as_eager(attention, *qkv(), torch.randn(4, 6, 6, requires_grad=True), emitters=("sdpa",))
    assert statuses(told) == ["recognised"]
    assert "needs a gradient" in reasons(told)


def test_C5_a_pass_that_fails_does_not_stop_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage by stage in test_transaction; here the whole pipeline."""
    from sdpa_rewrite import pipeline

    def broken(graph: torch.fx.Graph) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(pipeline, "rewrite_graph", broken)
    q, k, v = qkv()
    out = compiled(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, strict=False)(q, k, v)
    torch.testing.assert_close(out, (q @ k.mT).softmax(-1) @ v)


def test_C6_second_order_gradients_are_refused_by_torch() -> None:
    q, k, v = qkv(grad=True)
    out = compiled(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v)
    [g] = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.square().sum().backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["all three", "query and key", "key and value", "chunks"])
def test_C7_one_buffer_in_several_roles(how: str, grad: bool) -> None:
    def attention(x: Tensor, y: Tensor) -> Tensor:
        q, k, v = {"all three": (x, x, x), "query and key": (x, x, y), "key and value": (y, x, x)}.get(how, (x, x, x))
        if how == "chunks":
            q, k = x.chunk(2, -1)
            v = q
        return ((q @ k.mT) * 0.3).softmax(-1) @ v

    x, y = (torch.randn(2, 4, 6, 8, requires_grad=grad) for _ in range(2))
    assert statuses(same_as_eager(attention, x, y)) == ["fused"]


# -- dropout -------------------------------------------------------------------------------------------------


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(((q @ k.mT) * 0.3).softmax(-1), 0.2) @ v


def test_D1_eagers_own_mask_with_fallback_random() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        told = same_as_eager(dropped, *qkv(grad=True))
    assert "fused" not in statuses(told)


@pytest.mark.parametrize("policy", ["exact", "any"])
def test_D1_the_mask_of_the_unfused_compiled_program(policy: str) -> None:
    """ATen draws none on the CPU: without our kernels the compiled program is the unfused one, whatever the policy."""
    q, k, v = qkv(grad=True)
    with report.collect() as told:
        torch.manual_seed(3)
        ours = compiled(dropped, dropout=policy, emitters=("sdpa", "flex"))(q, k, v)
    assert statuses(told) == ["recognised"]
    assert "dropout" in reasons(told)
    torch._dynamo.reset()
    torch.manual_seed(3)
    torch.testing.assert_close(ours, compiled(dropped, emitters=())(q, k, v), rtol=0, atol=0)


def test_D1_no_dropout_in_eval() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.drop(((q @ k.mT) * 0.3).softmax(-1)) @ v  # type: ignore[no-any-return]

    assert statuses(same_as_eager(Module().eval(), *qkv(grad=True))) == ["fused"]


# -- authors -------------------------------------------------------------------------------------------------


def test_A5_the_graph_is_in_order_after_the_rewrite() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = ((q @ k.mT) * 0.3).softmax(-1) @ v
        return ((x @ k.mT) * 0.3).softmax(-1) @ x

    graphs: list[torch.fx.GraphModule] = []
    assert statuses(same_as_eager(twice, *qkv(grad=True), keep=graphs)) == ["fused", "fused"]
    for gm in graphs:
        gm.graph.lint()


def test_A6_a_pass_that_was_there_before_runs_too() -> None:
    calls: list[str] = []

    def theirs(graph: torch.fx.Graph) -> None:
        calls.append("theirs")

    class Ours(AttentionPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            calls.append("ours")

    PassChain((theirs, Ours()))(torch.fx.Graph())
    assert calls == ["theirs", "ours"]


@pytest.mark.parametrize(
    "change", [{"dropout": "any"}, {"emitters": ("sdpa",)}, {"disabled_forms": ("training",)}, {"verify": False}]
)
def test_A7_the_cache_key_follows_the_options(change: dict[str, Any]) -> None:
    key = AttentionPass().uuid()
    with config.patch(change):
        assert AttentionPass().uuid() != key
    assert AttentionPass().uuid() == key


def test_compiling_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        same_as_eager(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv(grad=True))
