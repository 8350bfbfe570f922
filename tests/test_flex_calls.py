"""FlexAttention on CPU: its calls are attention like any other, trained too, and stay what they are where not fused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import sdpa_rewrite
from sdpa_rewrite import pipeline, report
from tests.harness import compiled
from tests.test_costs import written

N, HEADS = 192, 4
Reference = Callable[..., Tensor]
Q, K, V = Annotated[Tensor, "b h i d"], Annotated[Tensor, "b h j d"], Annotated[Tensor, "b h j e"]
OPTIONS: dict[str, Any] = {"emitters": ("fused",), "cost_model": False}


def dense(q: Tensor, k: Tensor, v: Tensor, score: Callable[[Tensor], Tensor], visible: Tensor | None) -> Tensor:
    """Attention in eager, keys and values repeated for their groups; a row that sees nothing gives 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = score(q @ k.mT / math.sqrt(q.shape[-1]))
    scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    return torch._safe_softmax(scores, -1) @ v


def same(scores: Tensor) -> Tensor:
    return scores


ROWS, COLUMNS = torch.arange(N)[:, None], torch.arange(N)
DOCUMENTS = COLUMNS // 40


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])


def blocks_of(mask_mod: Any, size: int = 32) -> BlockMask:
    return create_block_mask(mask_mod, None, None, N, N, device="cpu", BLOCK_SIZE=size)


def listed(mask_mod: Any, full: bool) -> tuple[BlockMask, Tensor]:
    """Blocks of 64: the diagonal in part, and in full the last, which a causal mask would hide; what that shows."""
    numbers, indices = (
        torch.ones(1, 1, 3, dtype=torch.int32),
        torch.arange(3).reshape(1, 1, 3, 1).int().repeat(1, 1, 1, 3),
    )
    visible = ROWS // 64 == COLUMNS // 64
    visible = visible & (ROWS >= COLUMNS) if mask_mod else visible
    rest: tuple[Tensor, Tensor] | tuple[()] = ()
    if full:
        rest = torch.tensor([[[1, 1, 0]]]).int(), torch.full((1, 1, 3, 3), 2).int()
        visible = visible | ((COLUMNS // 64 == 2) & (ROWS // 64 < 2))
    mask = BlockMask.from_kv_blocks(numbers, indices, *rest, BLOCK_SIZE=64, mask_mod=mask_mod, seq_lengths=(N, N))
    return mask, visible


@dataclass(frozen=True)
class Form:
    """A call, with a tensor that its score_mod captures or without, and what it means."""

    score_mod: Callable[[Tensor], Callable[..., Tensor]] | None
    block_mask: BlockMask | None
    meaning: Callable[[Tensor], Callable[[Tensor], Tensor]]
    visible: Tensor | None
    captured: tuple[int, ...] = (HEADS,)

    def call(self, q: Tensor, k: Tensor, v: Tensor, captured: Tensor) -> Tensor:
        score_mod = self.score_mod(captured) if self.score_mod else None
        out = flex_attention(q, k, v, score_mod, self.block_mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    def reference(self, q: Tensor, k: Tensor, v: Tensor, captured: Tensor) -> Tensor:
        return dense(q, k, v, self.meaning(captured), self.visible)


def plain(captured: Tensor) -> Callable[[Tensor], Tensor]:
    return same


FORMS = {
    "no mask": Form(None, None, plain, None),
    "causal blocks": Form(None, blocks_of(causal), plain, ROWS >= COLUMNS),
    "documents": Form(None, blocks_of(document), plain, (ROWS >= COLUMNS) & (DOCUMENTS[:, None] == DOCUMENTS)),
    "learned slopes": Form(
        lambda slopes: lambda s, b, h, i, j: s + slopes[h] * (j - i) / N,
        blocks_of(causal),
        lambda slopes: lambda s: s + slopes[:, None, None] * (COLUMNS - ROWS) / N,
        ROWS >= COLUMNS,
    ),
    "a learned table": Form(
        lambda table: lambda s, b, h, i, j: s + table[h, i - j + N],
        None,
        lambda table: lambda s: s + table[:, ROWS - COLUMNS + N],
        None,
        (HEADS, 2 * N),
    ),
    "soft cap": Form(
        lambda _: lambda s, b, h, i, j: torch.where(i >= j, 5.0 * torch.tanh(s / 5.0), -math.inf),
        None,
        lambda _: lambda s: 5.0 * torch.tanh(s / 5.0),
        ROWS >= COLUMNS,
    ),
    "chosen blocks": Form(None, listed(None, False)[0], plain, listed(None, False)[1]),
    "chosen blocks of a mask": Form(None, listed(causal, False)[0], plain, listed(causal, False)[1]),
    "full blocks beside a mask": Form(None, listed(causal, True)[0], plain, listed(causal, True)[1]),
}


def tensors(form: Form, dtype: torch.dtype = torch.float32, training: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, N, 16), (2, 2, N, 16), (2, 2, N, 24), form.captured]
    made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [x.requires_grad_(training) for x in made]


def evaluated(function: Callable[..., Tensor], args: list[Tensor], wide: bool = False) -> list[Tensor]:
    """The output and, if there are any, the gradients."""
    own = [(x.detach().double() if wide else x.detach()).requires_grad_(x.requires_grad) for x in args]
    out = function(*own)
    wanted = [x for x in own if x.requires_grad]
    if not wanted:
        return [out]
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator).to(args[0].dtype).to(out.dtype)
    grads = torch.autograd.grad(out, wanted, cotangent, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True))]


def close(ours: list[Tensor], true: list[Tensor], tolerance: float) -> None:
    for x, y in zip(ours, true, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * float(y.abs().max() + 1e-3))


def operators(graphs: list[torch.fx.GraphModule]) -> str:
    return " ".join(str(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_training_is_fused_and_right(name: str, dynamic: bool) -> None:
    form = FORMS[name]
    graphs: list[torch.fx.GraphModule] = []
    args = tensors(form)
    with sdpa_rewrite.enabled(), report.collect() as collected:
        ours = evaluated(compiled(form.call, dynamic, graphs, **OPTIONS), args)
    assert [(o.status, o.emitter, o.training) for o in collected.sites] == [("fused", "fused", True)]
    assert "flex" not in operators(graphs)
    close(ours, evaluated(form.reference, args, wide=True), 1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_inference_is_fused_and_right(name: str) -> None:
    form = FORMS[name]
    graphs: list[torch.fx.GraphModule] = []
    args = tensors(form, training=False)
    with torch.no_grad(), report.collect() as collected:
        ours = evaluated(compiled(form.call, keep=graphs, **OPTIONS), args)
        close(ours, evaluated(form.reference, args, wide=True), 1e-5)
    assert [o.status for o in collected.sites] == ["fused"]
    assert "flex" not in operators(graphs)


def test_blocks_that_do_not_divide_the_lengths_are_trained_only() -> None:
    """They become a mask as large as the scores, which torch's own kernel does without."""
    form = dataclasses.replace(FORMS["documents"], block_mask=blocks_of(document, 80))
    args = tensors(form)
    with sdpa_rewrite.enabled(), report.collect() as collected:
        ours = evaluated(compiled(form.call, **OPTIONS), args)
    assert [o.status for o in collected.sites] == ["fused"]
    close(ours, evaluated(form.reference, args, wide=True), 1e-5)
    graphs: list[torch.fx.GraphModule] = []
    with torch.no_grad(), report.collect() as collected:
        compiled(form.call, keep=graphs, **OPTIONS)(*(x.detach() for x in args))
    assert "do not divide the lengths" in str(collected.sites[0].reasons[0])
    assert "flex_attention" in operators(graphs)


@torch.no_grad()
def test_blocks_cost_a_table_of_blocks() -> None:
    graphs: list[torch.fx.GraphModule] = []
    for name in ("causal blocks", "documents", "full blocks beside a mask"):
        torch._dynamo.reset()
        compiled(FORMS[name].call, keep=graphs, **OPTIONS)(*tensors(FORMS[name], training=False))
    made = [n.meta["val"] for g in graphs for n in g.graph.nodes if n.op == "call_function"]
    assert max(x.untyped_storage().nbytes() for x in made if isinstance(x, Tensor)) <= 4 * 2 * HEADS * N * 24


def test_what_is_not_fused_stays_a_call_in_inference() -> None:
    form = FORMS["documents"]
    for options in ({"emitters": ("sdpa", "flex")}, {"upgrade_calls": False}, {"disabled_forms": ("inference",)}):
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []
        args = tensors(form, training=False)
        with torch.no_grad():
            ours = evaluated(compiled(form.call, keep=graphs, **options), args)
        assert "flex_attention" in operators(graphs)
        assert "bmm" not in operators(graphs)
        close(ours, evaluated(form.reference, args, wide=True), 1e-5)


@torch.no_grad()
def test_a_call_that_is_faster_stays_with_its_blocks(tmp_path: Path) -> None:
    form = FORMS["documents"]
    file = written(tmp_path / "costs.json", flex=1_000.0, fused=9_000.0, sdpa=9_000.0)
    graphs: list[torch.fx.GraphModule] = []
    with report.collect() as collected:
        compiled(form.call, keep=graphs, costs=file)(*tensors(form, training=False))
    assert [o.status for o in collected.sites] == ["recognised"]
    (call,) = (n for g in graphs for n in g.graph.nodes if "flex_attention" in str(n.target))
    assert call.args[4][-3:-1] == (32, 32)
    assert "bmm" not in operators(graphs)


@torch.no_grad()
def test_a_pass_that_fails_gives_the_calls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(pipeline.match, "candidates", broken)
    form = FORMS["documents"]
    graphs: list[torch.fx.GraphModule] = []
    compiled(form.call, keep=graphs, **OPTIONS | {"strict": False})(*tensors(form, training=False))
    assert "flex_attention" in operators(graphs)
    assert "bmm" not in operators(graphs)


@pytest.mark.parametrize("options", [{"upgrade_calls": False}, {"emitters": ("sdpa", "flex")}], ids=str)
def test_what_is_trained_is_written_out_whatever_the_options_say(options: dict[str, Any]) -> None:
    form = FORMS["learned slopes"]
    args = tensors(form)
    graphs: list[torch.fx.GraphModule] = []
    with sdpa_rewrite.enabled():
        ours = evaluated(compiled(form.call, keep=graphs, **options), args)
    close(ours, evaluated(form.reference, args, wide=True), 1e-5)
    assert "flex_attention_backward" not in operators(graphs)  # for which Inductor has no code on CPU


def test_what_is_not_fused_is_trained_as_plain_operators() -> None:
    form = FORMS["learned slopes"]
    args = [x.detach().double().requires_grad_() for x in tensors(form)]
    with sdpa_rewrite.enabled(), report.collect() as collected:
        ours = evaluated(compiled(form.call, **OPTIONS), args)
    (outcome,) = collected.sites
    assert outcome.status == "recognised"
    assert "float64" in str(outcome.reasons[0])
    close(ours, evaluated(form.reference, args), 1e-9)


def test_a_function_that_takes_rows_of_a_table_stays_in_inference_and_is_trained() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + table[h][i - j + N]

        out = flex_attention(q, k, v, score_mod, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    form = FORMS["a learned table"]
    args = tensors(form)
    with sdpa_rewrite.enabled():
        close(evaluated(compiled(call, **OPTIONS), args), evaluated(form.reference, args, wide=True), 1e-5)
    graphs: list[torch.fx.GraphModule] = []
    with torch.no_grad(), report.collect() as collected:
        compiled(call, keep=graphs, **OPTIONS)(*(x.detach() for x in args))
    assert "not pointwise" in str(collected.sites[0].reasons[0])
    assert "flex_attention" in operators(graphs)


def test_the_logsumexp_has_a_gradient_too() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out + aux.lse[..., None]

    def reference(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.softmax(-1) @ v + scores.logsumexp(-1, keepdim=True)

    args = tensors(FORMS["no mask"])
    with sdpa_rewrite.enabled():
        close(evaluated(compiled(call, **OPTIONS), args), evaluated(reference, args, wide=True), 1e-5)


def test_torch_still_refuses_elsewhere() -> None:
    form = FORMS["no mask"]
    with pytest.raises(Exception, match="does not support backward on CPU"):
        torch.compile(form.call, backend="eager")(*tensors(form))
    with sdpa_rewrite.enabled():
        torch.compile(form.call, backend="eager")(*tensors(form))


def test_explain_tells_of_a_trained_call() -> None:
    form = FORMS["learned slopes"]
    told = sdpa_rewrite.explain(form.call, *tensors(form))
    assert [(o.status, o.training) for o in told.sites] == [("fused", True)]
    assert "flex_attention(q, k, v" in told.sites[0].source


def test_what_a_pattern_replaces_is_no_call_any_more() -> None:
    """The pattern rewrites the plain operators before the engine sees them."""
    form = FORMS["causal blocks"]

    @sdpa_rewrite.pattern(name="any attention", register=False)
    def attention(q: Q, k: K, v: V, seen: Annotated[Tensor, "i j", torch.bool]) -> Tensor:
        return torch._safe_softmax(torch.where(seen, q @ k.mT * 0.25, -math.inf), -1) @ v

    @attention.replace
    def simply(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.25)

    graphs: list[torch.fx.GraphModule] = []
    args = tensors(form, training=False)
    args = [args[0], *(x.repeat_interleave(2, 1) for x in args[1:3]), args[3]]
    with torch.no_grad(), sdpa_rewrite.patterns.scope(attention), report.collect() as collected:
        ours = evaluated(compiled(form.call, keep=graphs, **OPTIONS), args)
    assert collected.sites[0].emitter == "pattern any attention"
    assert "flex" not in operators(graphs)
    close(ours, evaluated(form.reference, args, wide=True), 1e-5)


@pytest.mark.codegen
def test_the_backend_alone_trains_it() -> None:
    form = FORMS["learned slopes"]
    args = tensors(form, torch.bfloat16)
    fused = torch.compile(form.call, backend="sdpa_rewrite", options={"strict": True, "cost_model": False})
    with report.collect() as collected:
        ours = evaluated(fused, args)
    assert [o.emitter for o in collected.sites] == ["fused"]
    close(ours, evaluated(form.reference, args, wide=True), 0.05)
