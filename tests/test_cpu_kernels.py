"""The kernels on CPU as Inductor compiles them: right to rounding, the same dropout as unfused, the same bits again."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import dropout, scaled_dot_product_attention

import sdpa_rewrite
from sdpa_rewrite import config, processor, report
from sdpa_rewrite.kernels.cpu import lowering, source
from tests.harness import NOISE, compare

pytestmark = pytest.mark.codegen
INFINITY = float("inf")
Function = Callable[..., Tensor]


def capped_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, m = q.shape[-2], k.shape[-2]
    scores = 5 * torch.tanh(q @ k.mT * 0.3 / 5)
    return scores.masked_fill(torch.arange(m) > torch.arange(n)[:, None] + (m - n), -INFINITY).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, temperature: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.mT * temperature.exp() + bias
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ v


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dropout((q @ k.mT * 0.3).softmax(-1), 0.25) @ v


def own(tensors: Any) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]


def results(function: Function, tensors: Any, cotangent_seed: int = 1) -> list[Tensor]:
    """The output and the gradient of every float tensor."""
    given = own(tensors)
    torch.manual_seed(0)
    out = function(*given)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(cotangent_seed)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in given if x.requires_grad], cotangent)]


def ours(function: Function, dynamic: bool = False) -> Function:
    options = {"emitters": ("fused",), "strict": True, "cost_model": False}
    return torch.compile(function, backend="sdpa_rewrite", dynamic=dynamic, options=options)  # type: ignore[arg-type]


def check(compiled: Function, function: Function, tensors: list[Tensor]) -> None:
    exact = results(function, [x.double() if x.is_floating_point() else x for x in tensors])
    for k, (a, b, c) in enumerate(zip(results(compiled, tensors), results(function, tensors), exact, strict=True)):
        text, _ = compare(a, b, c, NOISE[a.dtype])
        assert not text, f"value {k}: {text}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap_with_symbolic_shapes(dtype: torch.dtype) -> None:
    compiled = ours(capped_causal, dynamic=True)
    with report.collect() as collected:
        for batch, heads, n, m, d, e in ((2, 3, 17, 33, 40, 24), (2, 2, 130, 200, 16, 70), (3, 2, 7, 1000, 80, 96)):
            q, k, v = torch.randn(batch, heads, n, d), torch.randn(batch, heads, m, d), torch.randn(batch, heads, m, e)
            check(compiled, capped_causal, [x.to(dtype) for x in (q, k, v)])
    assert {o.emitter for o in collected.sites} == {"fused"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "group"), [(1, 1), (1, 2), (2, 1)])
def test_few_queries_in_training(dtype: torch.dtype, n: int, group: int) -> None:
    """Keys and values are read as they lie; copied where elements are not neighbours, or no whole vectors."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return (5 * torch.tanh((q @ k.mT + bias) / 5)).softmax(-1) @ v

    compiled = ours(function)
    apart = torch.randn(2, 64, 3, 150).permute(0, 2, 3, 1)
    for depth, v in ((64, torch.randn(2, 3, 150, 96)), (32, apart), (20, apart[..., :37])):
        q, k, bias = (torch.randn(s) for s in ((2, 3 * group, n, depth), (2, 3, 150, depth), (3 * group, n, 150)))
        with report.collect() as collected:
            check(compiled, function, [x.to(dtype) for x in (q, k, v, bias)])
        assert {o.emitter for o in collected.sites} == {"fused"}


def test_gradients_come_in_the_layout_of_the_unfused_program() -> None:
    """That of the key is the transposed of a product: a copy would be a kernel more."""
    compiled = ours(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    given = [torch.randn(2, 3, n, 40) for n in (70, 90, 90)]
    _, codes = run_and_get_code(results, compiled, given)
    kernels = [text for code in codes for text in code.split("async_compile.cpp_pybinding")[1:]]
    assert len(kernels) == 2
    assert all("namespace sdpa_rewrite" in text for text in kernels)


@torch.no_grad()
def test_our_hyperbolic_tangent() -> None:
    """Two keys, whose logits are tanh(score) and 0: sigmoid(tanh(score)) comes out."""
    x = torch.cat([torch.linspace(-12, 12, 5001), torch.logspace(-30, 1, 500), torch.tensor([INFINITY, -INFINITY])])
    q, k, v = x.view(1, 1, -1, 1).repeat(1, 1, 1, 2) / 2, torch.ones(1, 1, 2, 2), torch.eye(2).view(1, 1, 2, 2)
    hidden = torch.tensor([False, True])

    def function(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(q @ k.mT).masked_fill(hidden, 0.0).softmax(-1) @ v

    exact = x.double().tanh().sigmoid()
    with report.collect() as collected:
        out = ours(function)(q, k, v, hidden)[..., 0].flatten().double()
    assert [o.emitter for o in collected.sites] == ["fused"]
    assert (out - exact).abs().max() < 2.5e-7  # four roundings


def test_learned_bias_and_temperature_beside_a_mask_with_a_full_row() -> None:
    q, k, v = (torch.randn(2, 4, 100, 32) for _ in range(3))
    hidden = torch.rand(2, 1, 100, 100) > 0.7
    hidden[:, :, 3] = True
    hidden[:, :, :, 64:] = True  # whole tiles
    hidden[1, :, 70:, :64] = True
    given = [q, k, v, torch.randn(4, 100, 100), torch.randn(4, 1, 1), hidden]
    compiled = ours(biased)
    check(compiled, biased, given)
    first, again = results(compiled, given), results(compiled, given)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_mask_by_the_logarithm_of_what_is_nearly_zero() -> None:
    """1e-45 is denormal: the kernel may flush its own such numbers to 0, not a program's, nor anybody's afterwards."""

    def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return (torch.sigmoid(q @ k.mT) * seen + 1e-45).log().softmax(-1) @ v

    seen = torch.rand(30, 70) < 0.5
    seen[4] = False
    tensors = [torch.randn(2, 2, 30, 8), torch.randn(2, 2, 70, 8), torch.randn(2, 2, 70, 8)]
    with report.collect() as collected:
        check(ours(lambda q, k, v: masked(q, k, v, seen)), lambda q, k, v: masked(q, k, v, seen), tensors)
    assert {o.emitter for o in collected.sites} == {"fused"}
    assert (torch.full((64,), 1e-40) * 0.5).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_far_apart(dtype: torch.dtype) -> None:
    """Of most weights nothing is left in float32; the gradients of others are on the edge."""

    def steep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 8.0).softmax(-1) @ v

    tensors = [torch.randn(1, 2, 100, 16, dtype=dtype) for _ in "qkv"]
    check(ours(steep), steep, tensors)


@torch.no_grad()
def test_a_mask_of_few_rows_that_differ() -> None:
    """The first row says nothing of the others: there nothing is hidden, or everything of a tile."""
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 150, 16), torch.randn(1, 2, 150, 16)
    hidden = torch.rand(5, 150) > 0.5
    hidden[0, :64], hidden[0, 64:128] = False, True
    masked = ours(lambda q, k, v, hidden: (q @ k.mT).masked_fill(hidden, -INFINITY).softmax(-1) @ v)
    torch.testing.assert_close(
        masked(q, k, v, hidden), scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=1.0)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_the_unfused_program(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, 3, 90, 16, dtype=dtype) for _ in range(2))
    v = torch.eye(90, dtype=dtype).expand(2, 3, 90, 90)
    unfused = results(torch.compile(with_dropout, dynamic=False), [q, k, v])
    fused = results(ours(with_dropout), [q, k, v])
    assert torch.equal(unfused[0] == 0, fused[0] == 0)
    assert 0.2 < (fused[0] == 0).float().mean().item() < 0.3
    for a, b in zip(fused, unfused, strict=True):
        torch.testing.assert_close(
            a, b, **({"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05})
        )


@pytest.mark.parametrize("isa", ["avx2", "default"])
def test_other_instruction_sets(isa: str) -> None:
    """AVX2, and what any CPU with a C++ compiler takes."""
    with inductor.patch({"cpp.simdlen": {"avx2": 256, "default": 1}[isa]}):
        compiled = ours(capped_causal)
        check(compiled, capped_causal, [torch.randn(1, 2, 75, 24) for _ in "qkv"])
        check(compiled, capped_causal, [torch.randn(1, 2, n, 32, dtype=torch.bfloat16) for n in (2, 75, 75)])


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of torch's own way to switch oneDNN off
@pytest.mark.parametrize(("kind", "bits"), [("tiles", None), ("dots", None), ("floats", None), ("tiles", 256)], ids=str)
def test_each_way_to_multiply_bfloat16(kind: str, bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU with AMX gets, too: oneDNN makes the same products of what has no tiles.

    A compiler that knows no dot products makes floats, whatever was chosen.
    """
    if kind != "floats" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("the CPU has no dot products of bfloat16")
    monkeypatch.setattr(processor, "pairs", lambda: kind)
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT * 0.3 + bias).masked_fill(torch.arange(m) > torch.arange(n)[:, None] + 20, -INFINITY)
        return scores.softmax(-1) @ v

    def inputs(n: int) -> list[Tensor]:
        sizes = (2, 4, n, 41), (2, 2, 149, 41), (2, 2, 149, 70), (4, n, 149)
        return [torch.randn(size, dtype=torch.bfloat16) for size in sizes]

    compiled, given = ours(function), inputs(107)
    with inductor.patch({"fx_graph_cache": False, "cpp.simdlen": bits}):
        _, codes = run_and_get_code(check, compiled, function, given)
        check(compiled, function, inputs(2))
    kernels = [text for code in codes for text in code.split("async_compile.cpp_pybinding") if "sdpa_rewrite" in text]
    assert len(kernels) == 2
    assert all(f"#define SDPA_REWRITE_{kind.upper()}\n" in text for text in kernels)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN refuses
        check(compiled, function, given)


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_was_never_written_is_not_read(dtype: torch.dtype, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are fewer than a tile and no whole vectors: what is computed beyond them must not reach any sum."""
    poisoned = "#define SDPA_REWRITE_POISONED\n" + source.headers()
    monkeypatch.setattr(lowering, "headers", lambda: poisoned)
    torch._dynamo.reset()
    given = [torch.randn(s).to(dtype) for s in ((2, 3, n, 20), (2, 3, 21, 20), (2, 3, 21, 37), (3, n, 21), (3, 1, 1))]
    with inductor.patch({"fx_graph_cache": False}):
        check(ours(biased), biased, [*given, torch.rand(2, 1, n, 21) > 0.7])


@torch.no_grad()
def test_one_thread_and_two_and_one_query_for_long_keys() -> None:
    compiled = ours(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    q, k, v = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 3000, 64), torch.randn(1, 2, 3000, 64)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.testing.assert_close(compiled(q, k, v), scaled_dot_product_attention(q, k, v, scale=1.0))
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_layers_that_are_alike_share_a_kernel() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ ((q @ k.mT).softmax(-1) @ v).mT).softmax(-1) @ v

    with config.patch(emitters=("fused",), strict=True):
        _, (code,) = run_and_get_code(
            torch.compile(two, backend="sdpa_rewrite", dynamic=False), *(torch.randn(1, 2, 50, 16) for _ in range(3))
        )
    assert len(re.findall(r"= async_compile.cpp_pybinding\([^\n]*\n[^\n]*\n#include <numeric>", code)) <= 1
    assert len(re.findall(r"^ +cpp_fused_attention_\w+\(", code, re.M)) == 2


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slopes made in the graph: an exponential that all keys share."""
    n, h = q.shape[-2], q.shape[1]
    slopes = torch.exp(-0.5 * (torch.arange(h, dtype=q.dtype) + 1)).view(-1, 1, 1)
    return (q @ k.mT - slopes * (torch.arange(n)[:, None] - torch.arange(n)).abs()).softmax(-1) @ v


def test_what_is_dear_and_shared_along_a_row_is_inlined() -> None:
    check(ours(alibi), alibi, [torch.randn(1, 4, 50, 16) for _ in range(3)])


def test_a_program_that_cannot_be_inlined_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> str:
        raise RuntimeError("injected")

    monkeypatch.setattr(source, "row_function", broken)
    check(ours(alibi), alibi, [torch.randn(1, 4, 20, 16) for _ in range(3)])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, in its export
@torch.no_grad()
def test_ahead_of_time(tmp_path: Path) -> None:
    """An exported program, compiled by AOTInductor into a package with our kernel in it."""

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return capped_causal(q, k, v)

    args = tuple(torch.randn(1, 2, 40, 16) for _ in range(3))
    with sdpa_rewrite.enabled(), config.patch(strict=True):
        exported = torch.export.export(Module(), args)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*args), capped_causal(*args))
    with zipfile.ZipFile(path) as package:
        kernels = [package.read(n) for n in package.namelist() if n.endswith(".kernel.cpp")]
    assert any(b"namespace sdpa_rewrite" in text for text in kernels)
