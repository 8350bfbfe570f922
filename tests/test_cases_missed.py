"""Equivalent forms that others miss (table M of the cases people reported): each is recognised, and right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import report
from tests.harness import compiled, reasons, same_as_eager, statuses

ATTENTION = Callable[..., Tensor]


def qkv(
    b: int = 2, h: int = 4, s: int = 6, d: int = 8, dtype: torch.dtype = torch.float32, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(b, h, s, d).to(dtype).requires_grad_(grad) for _ in range(3))
    return q, k, v


def fused(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    assert statuses(same_as_eager(function, *args, **options)) == ["fused"]


CAUSAL = torch.tril(torch.ones(6, 6, dtype=torch.bool))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_M1_a_mask_made_of_a_bool_and_half_inputs(grad: bool, half: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = torch.zeros(6, 6, dtype=q.dtype).masked_fill(~keep, -math.inf)
        return ((q @ k.transpose(-2, -1)) * 0.3 + mask).softmax(-1) @ v

    fused(attention, *qkv(dtype=torch.bfloat16 if half else torch.float32, grad=grad), CAUSAL)


@pytest.mark.parametrize("half", [False, True])
def test_M1_with_dropout_on_the_probabilities(half: bool) -> None:
    """No kernel of ATen on the CPU takes dropout; ours do."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = torch.zeros(6, 6, dtype=q.dtype).masked_fill(~keep, -math.inf)
        return F.dropout(((q @ k.transpose(-2, -1)) * 0.3 + mask).softmax(-1), 0.1) @ v

    with report.collect() as told:
        compiled(attention)(*qkv(dtype=torch.bfloat16 if half else torch.float32, grad=True), CAUSAL)
    assert statuses(told) == ["fused"]
    assert told.sites[0].form is not None
    assert told.sites[0].form.dropout == pytest.approx(0.1)


@pytest.mark.parametrize(
    "scores",
    [
        lambda s, m: s * 0.3 + m,
        lambda s, m: m + s * 0.3,
        lambda s, m: m + 0.3 * s,
        lambda s, m: torch.add(m, s, alpha=0.3),
        lambda s, m: s * 0.3 - (-m),
    ],
)
def test_M2_operand_order(scores: ATTENTION) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return scores(q @ k.transpose(-2, -1), m).softmax(-1) @ v

    fused(attention, *qkv(), torch.randn(6, 6))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "scale", [lambda d: 1 / math.sqrt(d), lambda d: d**-0.5, lambda d: 1.0 / (d**0.5)], ids=["sqrt", "pow", "inverse"]
)
def test_M3_M4_dynamic_shapes_and_a_scale_made_of_a_size(scale: Callable[[Any], Any], grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        out = ((q @ k.transpose(-2, -1)) * scale(d)).softmax(-1) @ v
        return out.transpose(1, 2).reshape(b, s, h * d)

    told = same_as_eager(attention, *qkv(b=3, h=5, s=7, d=9, grad=grad), dynamic=True)
    assert statuses(told) == ["fused"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("form", ["scores", "quotient", "both operands"])
def test_a_number_of_pythons_that_may_change(form: str, grad: bool, dtype: torch.dtype) -> None:
    """Under dynamic shapes Dynamo makes it a float64 tensor, which is cast down anew at each of its uses."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 0.3

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if form == "both operands":
                return ((q * self.scale) @ (k * self.scale).mT).softmax(-1) @ v
            s = q @ k.mT
            return (s * self.scale if form == "scores" else s / self.scale).softmax(-1) @ v

    told = same_as_eager(Attention(), *qkv(s=7, grad=grad, dtype=dtype), dynamic=True)
    assert statuses(told) == ["fused"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_M5_a_causal_mask_sliced_out_of_a_buffer(dynamic: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
        s, t = q.shape[-2], k.shape[-2]
        scores = (q @ k.transpose(-2, -1)) * 0.25
        return scores.masked_fill(buffer[:, :, t - s : t, :t] == 0, -math.inf).softmax(-1) @ v

    fused(attention, *qkv(), torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), dynamic=dynamic)


def test_M6_no_scale_heads_in_the_batch_and_a_mask_of_another_type() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        q, k, v = (x.reshape(-1, x.shape[2], x.shape[3]) for x in (q, k, v))
        return torch.bmm((torch.bmm(q, k.transpose(1, 2)) + m).softmax(-1).to(v.dtype), v)

    fused(attention, *qkv(dtype=torch.bfloat16), torch.randn(6, 6))


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 4])
def test_M7_a_batch_of_one_or_one_head(b: int, h: int) -> None:
    def attention(x: Tensor, w: Tensor) -> Tensor:
        n, s, _ = x.shape
        q, k, v = (y.view(n, s, h, 8).transpose(1, 2) for y in (x @ w).chunk(3, -1))
        out = ((q @ k.transpose(-2, -1)) / math.sqrt(8)).softmax(-1) @ v
        return out.transpose(1, 2).contiguous().view(n, s, h * 8)

    fused(attention, torch.randn(b, 6, 8), torch.randn(8, 3 * h * 8, requires_grad=True))


def test_M8_alibi_on_scaled_scores() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        distance = torch.arange(6)[None, :] - torch.arange(6)[:, None]
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(8)
        return (scores + slopes[:, None, None] * distance).softmax(-1) @ v

    fused(attention, *qkv(grad=True), 2.0 ** -torch.arange(1, 5).float())


@pytest.mark.parametrize("masked", [False, True])
def test_M9_torchs_own_math_decomposition(masked: bool) -> None:
    """Square roots of the scale on both sides, and safe softmax."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        c = math.sqrt(1 / math.sqrt(8))
        scores = (q * c) @ (k.transpose(-2, -1) * c)
        if masked:
            scores = scores + torch.where(keep, 0.0, -math.inf)
        return torch.ops.aten._safe_softmax(scores, -1) @ v

    keep = CAUSAL.clone()
    keep[2] = False
    told = same_as_eager(attention, *qkv(), keep)
    assert statuses(told) == ["fused"]
    assert told.sites[0].form is not None
    assert told.sites[0].form.softmax == "safe"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("scores", "values", "order"),
    [
        ("bhid,bhjd->bhij", "bhij,bhjd->bhid", (0, 1, 2, 3)),
        ("bihd,bjhd->bhij", "bhij,bjhd->bihd", (0, 2, 1, 3)),
        ("bihd,bjhd->bijh", "bijh,bjhd->bihd", (0, 2, 1, 3)),
        ("ibhd,jbhd->bhij", "bhij,jbhd->ibhd", (2, 0, 1, 3)),
        ("bhdi,bhdj->bhij", "bhij,bhdj->bhdi", (0, 1, 3, 2)),
    ],
)
def test_M10_einsum(scores: str, values: str, order: tuple[int, ...], grad: bool) -> None:
    dim = scores.split("->")[1].index("j")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(values, (torch.einsum(scores, q, k) * 0.4).softmax(dim), v)

    q, k, v = qkv(b=2, h=3, s=5, d=4)
    fused(attention, *(x.permute(order).contiguous().requires_grad_(grad) for x in (q, k, v)))


def test_M11_soft_cap_between_scale_and_mask_is_recognised() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = torch.tanh((q @ k.transpose(2, 3)) * 0.3 / 50.0) * 50.0 + m
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    told = same_as_eager(attention, *qkv(grad=True), torch.randn(2, 1, 6, 6))
    assert statuses(told) == ["fused"]
    assert told.sites[0].form is not None
    assert "soft-cap" in told.sites[0].form.score
    told = same_as_eager(attention, *qkv(grad=True), torch.randn(2, 1, 6, 6), emitters=("sdpa",))
    assert statuses(told) == ["recognised"]
    assert "tanh" in reasons(told)


@pytest.mark.parametrize(
    ("mask", "word"),
    [
        (lambda s: torch.zeros(1, 1, s, s), "none"),
        (lambda s: torch.full((s, s), -3e38).triu(1), "causal"),
        (lambda s: torch.zeros(s, s).masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), -math.inf), "causal"),
        (lambda s: torch.where(torch.arange(s)[None] <= torch.arange(s)[:, None], 0.0, -math.inf), "causal"),
        (lambda s: (1.0 - torch.ones(1, 1, 1, s)) * -10000.0, "none"),
    ],
)
def test_M12_a_constant_mask_is_folded(mask: Callable[[int], Tensor], word: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3 + mask(q.shape[-2])).softmax(-1) @ v

    graphs: list[torch.fx.GraphModule] = []
    told = same_as_eager(attention, *qkv(), keep=graphs)
    assert statuses(told) == ["fused"]
    assert told.sites[0].form is not None
    assert told.sites[0].form.mask == word
    [kernel] = [n for n in graphs[0].graph.nodes if "attention" in str(n.target)]
    assert kernel.kwargs.get("attn_mask") is None


@pytest.mark.parametrize("grad", [False, True])
def test_M13_bias_and_mask_together(grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor, padding: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3 + bias
        scores = scores.masked_fill(~keep, -math.inf) + padding[:, None, None, :]
        return scores.softmax(-1) @ v

    fused(attention, *qkv(grad=grad), torch.randn(4, 6, 6), CAUSAL, torch.randn(2, 6))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cut", ["split", "slice"])
def test_M14_a_key_value_cache_kept_apart(cut: str, grad: bool) -> None:
    """One softmax over scores of two key tensors, two contractions with values: left alone, and told why."""

    def attention(q: Tensor, k: Tensor, v: Tensor, k0: Tensor, v0: Tensor) -> Tensor:
        scores = torch.cat([q @ k0.transpose(-2, -1), q @ k.transpose(-2, -1)], -1) * 0.3
        p = scores.softmax(-1)
        old, new = p.split([4, 6], -1) if cut == "split" else (p[..., :4], p[..., 4:])
        return old @ v0 + new @ v

    cache = (torch.randn(2, 4, 4, 8, requires_grad=grad) for _ in range(2))
    told = same_as_eager(attention, *qkv(grad=grad), *cache)
    (site,) = told.sites
    assert site.status == "missed"
    (reason,) = site.reasons
    assert "one softmax runs over several key tensors" in reason.text
    assert reason.role == "softmax"
    assert reason.node
    assert "test_cases_missed.py" in reason.source


@pytest.mark.parametrize("grad", [False, True])
def test_M15_a_sink(grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) * 0.3
        sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        joined = torch.cat([scores, sink], dim=-1)
        p = F.softmax(joined - joined.max(dim=-1, keepdim=True).values, dim=-1)[..., :-1]
        return p @ v

    told = same_as_eager(attention, *qkv(grad=grad), torch.randn(4, requires_grad=grad))
    assert statuses(told) == ["fused"]
    assert told.sites[0].form is not None
    assert told.sites[0].form.softmax == "softmax with sink"
