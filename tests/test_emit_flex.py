"""The flex emitter: what it makes, that it means what was written, and why it declines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from sdpa_rewrite.emit import flex, flex_call
from tests.harness import compiled, same_as_eager

Function = Callable[..., Tensor]
FLEX = torch.ops.higher_order.flex_attention
INFINITY = float("inf")

# eager FlexAttention maps the score program over all positions, which is slow for casts and no matter here
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def capped(q: Tensor, k: Tensor) -> Tensor:
    """Scores with a soft cap: what SDPA cannot express."""
    return 5 * torch.tanh(q @ k.mT * 0.3 / 5)


def causal(scores: Tensor) -> Tensor:
    n, m = scores.shape[-2:]
    future = torch.arange(m) > torch.arange(n)[:, None]
    return scores.masked_fill(future, -INFINITY)


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(capped(q, k)).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, heads = q.shape[-2], q.shape[1]
    slopes = 2.0 ** -(torch.arange(heads) + 1.0)
    distance = (torch.arange(n) - torch.arange(n)[:, None]).to(q.dtype)
    return causal(capped(q, k) + slopes[:, None, None].to(q.dtype) * distance).softmax(-1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[-2]
    behind = torch.arange(n)[:, None] - torch.arange(n)
    return capped(q, k).masked_fill((behind < 0) | (behind >= 5), -INFINITY).softmax(-1) @ v


def offset_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, m = q.shape[-2], k.shape[-2]
    past = torch.arange(n)[:, None] + (m - n) >= torch.arange(m)
    return torch.where(past, capped(q, k), -INFINITY).softmax(-1) @ v


def sigmoid_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (3 * torch.sigmoid(q @ k.mT)).softmax(-1) @ v


def buckets(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[-2]
    distance = (torch.arange(n) - torch.arange(n)[:, None]).abs() // 4
    return (capped(q, k) - distance.clamp(max=3)).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    return soft_cap(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return capped(q, k).masked_fill(mask, -INFINITY).softmax(-1) @ v


def filled_with_minimum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = capped(q, k)
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (capped(q, k) + bias).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return (capped(q, k) + (1.0 - visible.to(q.dtype)) * -1e9).softmax(-1) @ v


def multiplied(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return (q @ k.mT * weight).softmax(-1) @ v


def flattened(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return (5 * torch.tanh(torch.bmm(q, k.mT) / 5) + bias).softmax(-1) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = causal(capped(q, k))
    column = sink[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def safe(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = capped(q, k).masked_fill(mask, -INFINITY)
    empty = (scores == -INFINITY).all(-1, keepdim=True)
    return torch.where(empty, 0.0, scores.softmax(-1)) @ v


def per_row_gate(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (causal(capped(q, k)).softmax(-1) * gate) @ v


def tensors(heads: int = 4, kv_heads: int = 4, n: int = 17, m: int | None = None, d: int = 16) -> tuple[Tensor, ...]:
    q = torch.randn(2, heads, n, d)
    k, v = (torch.randn(2, kv_heads, m or n, d) for _ in range(2))
    return q, k, v


def mask_with_empty_row(*shape: int) -> Tensor:
    mask = torch.rand(*shape) > 0.6
    mask[0, ..., 3, :] = True
    return mask


def fused_by(collected: Any) -> list[str]:
    return [o.emitter for o in collected.sites]


def reasons(function: Function, *args: Tensor, **options: Any) -> list[str]:
    """Why flex declines the one site of ``function``."""
    collected = same_as_eager(function, *args, emitters=("flex",), **options)
    (site,) = collected.sites
    assert site.status == "recognised"
    return [r.text for r in site.reasons]


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs for CUDA, made and run on CPU: in eager the operator works anywhere."""
    monkeypatch.setattr(flex, "device_of", lambda site: torch.device("cuda"))


CASES: dict[str, tuple[Function, Callable[[], tuple[Tensor, ...]]]] = {
    "soft cap": (soft_cap, tensors),
    "alibi from indices": (alibi, tensors),
    "sliding window": (windowed, tensors),
    "causal with an offset": (offset_causal, lambda: tensors(n=7, m=17)),
    "any pointwise function": (sigmoid_scores, tensors),
    "distance buckets": (buckets, tensors),
    "grouped heads": (grouped, lambda: tensors(kv_heads=2)),
    "one key head": (grouped, lambda: tensors(kv_heads=1)),
    "mask tensor, an empty row": (filled, lambda: (*tensors(), mask_with_empty_row(2, 1, 17, 17))),
    "smallest float, a full row": (filled_with_minimum, lambda: (*tensors(), mask_with_empty_row(2, 1, 17, 17))),
    "bias per head": (added, lambda: (*tensors(), torch.randn(4, 17, 17))),
    "additive mask, an empty row": (
        added,
        lambda: (*tensors(), torch.zeros(2, 1, 17, 17).masked_fill(mask_with_empty_row(2, 1, 17, 17), -INFINITY)),
    ),
    "expanded bias": (added, lambda: (*tensors(), torch.randn(1, 1, 17, 17).expand(2, 4, 17, 17))),
    "key padding computed in the graph": (padded, lambda: (*tensors(), torch.rand(2, 1, 1, 17) > 0.3)),
    "scores times a tensor": (multiplied, lambda: (*tensors(), torch.randn(2, 1, 17, 17))),
    "batch and heads in one dimension": (flattened, lambda: (*tensors(), torch.randn(8, 17, 17))),
    "sink": (with_sink, lambda: (*tensors(), torch.randn(4))),
    "safe softmax": (safe, lambda: (*tensors(), mask_with_empty_row(2, 1, 17, 17))),
    "a factor per row": (per_row_gate, lambda: (*tensors(), torch.rand(2, 4, 17, 1))),
}


@pytest.mark.parametrize("case", CASES)
def test_inference_means_what_was_written(case: str) -> None:
    function, make = CASES[case]
    with torch.no_grad():
        collected = same_as_eager(function, *make(), emitters=("flex",))
    assert fused_by(collected) == ["flex"]


@pytest.mark.parametrize("case", ["soft cap", "grouped heads", "causal with an offset", "sliding window"])
def test_symbolic_shapes(case: str) -> None:
    function, make = CASES[case]
    with torch.no_grad():
        collected = same_as_eager(function, *make(), dynamic=True, emitters=("flex",))
    assert fused_by(collected) == ["flex"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors())
    with torch.no_grad():
        collected = same_as_eager(added, q, k, v, torch.randn(4, 17, 17).to(dtype), emitters=("flex",))
    assert fused_by(collected) == ["flex"]


def test_a_nan_in_the_query_stays_in_its_row() -> None:
    q, k, v = tensors()
    q[0, 0, 5] = math.nan
    with torch.no_grad():
        out = compiled(soft_cap, emitters=("flex",))(q, k, v)
    assert out[0, 0, 5].isnan().all()
    assert out.isnan().sum() == 16


def test_one_operator_and_no_scores() -> None:
    kept: list[GraphModule] = []
    with torch.no_grad():
        compiled(soft_cap, keep=kept, emitters=("flex",))(*tensors())
    targets = [n.target for n in kept[0].graph.nodes if n.op == "call_function"]
    assert targets.count(FLEX) == 1
    assert torch.ops.aten.bmm.default not in targets
    assert torch.ops.aten.exp.default not in targets


def test_the_scale_goes_to_the_kernel() -> None:
    kept: list[GraphModule] = []
    with torch.no_grad():
        compiled(soft_cap, keep=kept, emitters=("flex",))(*tensors())
    (node,) = (n for n in kept[0].graph.nodes if n.target is FLEX)
    assert node.args[5] == pytest.approx(0.3 / 5)


def test_sdpa_comes_first_where_it_can() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q @ k.mT).softmax(-1) @ v

    with torch.no_grad():
        assert fused_by(same_as_eager(plain, *tensors(), emitters=("sdpa", "flex"))) == ["sdpa"]
        assert fused_by(same_as_eager(soft_cap, *tensors(), emitters=("sdpa", "flex"))) == ["flex"]


# -- training, for GPUs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("sink", "scores times a tensor")])
def test_training_on_gpu_means_what_was_written(case: str, as_on_gpu: None) -> None:
    function, make = CASES[case]
    q, k, v, *rest = make()
    collected = same_as_eager(function, *(x.requires_grad_() for x in (q, k, v)), *rest, emitters=("flex",))
    assert fused_by(collected) == ["flex"]


def test_gradient_of_a_bias(as_on_gpu: None) -> None:
    args = [x.requires_grad_() for x in (*tensors(), torch.randn(4, 17, 17))]
    assert fused_by(same_as_eager(added, *args, emitters=("flex",))) == ["flex"]


def test_sink_by_logsumexp(as_on_gpu: None) -> None:
    with torch.no_grad():
        collected = same_as_eager(with_sink, *tensors(), torch.randn(4), emitters=("flex",))
    assert fused_by(collected) == ["flex"]


# -- reasons -------------------------------------------------------------------------------------------------


def test_no_backward_on_cpu() -> None:
    args = [x.requires_grad_() for x in tensors()]
    assert reasons(soft_cap, *args) == ["FlexAttention has no backward on CPU"]


@torch.no_grad()
def test_weights_that_vary_along_the_keys() -> None:
    def post_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (capped(q, k).softmax(-1) * keep) @ v

    assert reasons(post_mask, *tensors(), torch.rand(17, 17)) == [
        "the probabilities are changed after the softmax (by a weight program)"
    ]


@torch.no_grad()
def test_float64() -> None:
    assert reasons(soft_cap, *(x.double() for x in tensors())) == ["FlexAttention does not compute in torch.float64"]


@torch.no_grad()
def test_a_tensor_of_symbolic_shape_on_cpu() -> None:
    assert reasons(added, *tensors(), torch.randn(4, 17, 17), dynamic=True) == [
        "the score program reads a tensor of symbolic shape, on CPU"
    ]


@torch.no_grad()
def test_a_bias_that_is_part_of_the_query_on_cpu() -> None:
    def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (capped(q[..., 1:], k[..., 1:]) + q[..., :1]).softmax(-1) @ v

    assert reasons(gated, *tensors()) == [
        "the score program reads a tensor that query, key or value are part of, on CPU"
    ]


@torch.no_grad()
def test_a_cpu_without_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_call, "runs_on_cpu", lambda: False)
    assert reasons(soft_cap, *tensors()) == ["FlexAttention has no kernel for this CPU (it needs AVX2)"]


@torch.no_grad()
def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "device_of", lambda site: torch.device("mps"))
    assert reasons(soft_cap, *tensors()) == ["FlexAttention has no kernel for mps"]


@torch.no_grad()
def test_head_sizes_of_the_triton_kernels(as_on_gpu: None) -> None:
    assert reasons(soft_cap, *tensors(d=8)) == [
        "the head size of the query is 8, not within 16 to 256",
        "the head size of the value is 8, not within 16 to 256",
    ]


def test_the_gradient_of_a_number_on_gpu(as_on_gpu: None) -> None:
    def shifted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(q @ k.mT + bias).softmax(-1) @ v

    args = [x.requires_grad_() for x in (*tensors(), torch.randn(4, 1, 1))]
    assert reasons(shifted, *args) == [
        "a tensor that all rows or all columns share needs a gradient: additions to few cells"
    ]


def test_training_with_scores_times_a_tensor_on_gpu(as_on_gpu: None) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    assert reasons(multiplied, q, k, v, torch.randn(2, 1, 17, 17)) == [
        "scores are multiplied by a tensor: logits as large as it may hold cost the backward its digits"
    ]


@torch.no_grad()
def test_rows_that_may_be_empty_for_reasons_not_understood() -> None:
    def logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.log(torch.relu(q @ k.mT)).softmax(-1) @ v

    assert reasons(logarithm, *tensors()) == ["whether a row is masked as a whole cannot be told behind log"]


# -- real kernels --------------------------------------------------------------------------------------------

needs_kernel = pytest.mark.skipif(not flex_call.runs_on_cpu(), reason="torch's CPU kernel does not support this CPU")


def attend_in_a_layer(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Query, key and value as parts of one product, and an epilogue."""
    q, k, v = (x @ w).view(2, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return residual + added(q, k, v, bias)


def run(function: Function, *args: Tensor, dynamic: bool = False) -> Tensor:
    with torch.no_grad():
        options: dict[str, Any] = {"emitters": ("flex",), "strict": True}
        out: Tensor = torch.compile(function, backend="sdpa_rewrite", dynamic=dynamic, options=options)(*args)
    return out


def close(out: Tensor, function: Function, *args: Tensor) -> None:
    exact = function(*(x.double() if x.is_floating_point() else x for x in args))
    error = (function(*args).double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * error + 2e-6


@pytest.mark.codegen
@needs_kernel
def test_kernel_with_parts_of_one_product_and_an_epilogue() -> None:
    args = torch.randn(2, 130, 32), torch.randn(32, 96) / 6, torch.randn(4, 130, 130), torch.randn(2, 4, 130, 8)
    close(run(attend_in_a_layer, *args), attend_in_a_layer, *args)


@pytest.mark.codegen
@needs_kernel
def test_kernel_with_grouped_heads_in_bfloat16() -> None:
    args = [x.bfloat16() for x in tensors(kv_heads=2, n=130, d=40)]
    close(run(grouped, *args), grouped, *args)


@pytest.mark.codegen
@needs_kernel
def test_kernel_with_symbolic_shapes() -> None:
    for n in (17, 130, 1000):
        args = tensors(n=n)
        close(run(alibi, *args, dynamic=True), alibi, *args)


@pytest.mark.codegen
@needs_kernel
def test_kernel_with_sink_and_rows_masked_as_a_whole() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([with_sink(q, k, v, sink), filled(q, k, v, mask)])

    args = (*tensors(n=33), torch.randn(4), mask_with_empty_row(2, 1, 33, 33))
    out = run(both, *args)
    assert out[2, :, 3].isnan().all()
    written = both(*args)
    torch.testing.assert_close(out, written, equal_nan=True)
