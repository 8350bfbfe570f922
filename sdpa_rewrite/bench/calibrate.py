"""The costs of ``sdpa_rewrite.costs`` on this machine: measured over sizes, fitted, and checked."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sdpa_rewrite import config, costs
from sdpa_rewrite.bench import forms
from sdpa_rewrite.bench.forms import DROPOUT, Form, Size
from sdpa_rewrite.bench.measure import interleaved, medians
from sdpa_rewrite.costs import COUNTS, UNFUSED, Work
from sdpa_rewrite.processor import instruction_set

SIZES = (
    *(Size(1, 2, n, 16) for n in (4, 8, 16)),
    *(Size(2, 4, n, 64) for n in (16, 64, 128, 256, 512, 1024)),
    *(Size(8, 8, n, 32) for n in (16, 48, 200)),
    *(Size(2, 4, n, 128) for n in (32, 300, 800)),
    *(Size(2, 16, 1, 64, n) for n in (64, 200, 512)),  # no more than a cache holds
    *(Size(64, 8, 2, 32, n) for n in (10, 50)),
    *(Size(2, 8, 8, 64, n) for n in (100, 1000)),
)
SWEEP = tuple(Size(2, 4, n, 64) for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096))
REPEATS = 9


def full_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without a mask, with dropout."""
    return torch.nn.functional.dropout(forms.scores(q, k).softmax(-1), DROPOUT) @ v


FULL, FULL_DROPOUT = forms.FULL, Form("full, dropout 0.1", full_dropout)


@dataclass(frozen=True)
class Sample:
    """How long each kind of code took, in seconds."""

    work: Work
    size: str
    threads: int
    seconds: dict[str, float]


def work(form: Form, size: Size, dtype: torch.dtype, training: bool) -> Work:
    """What there is to do."""
    return Work(
        dtype=str(dtype).removeprefix("torch."),
        training=training,
        heads=size.batch * size.heads,
        shared=size.batch * size.shared,
        rows=size.queries,
        columns=size.columns,
        depth=2 * size.depth,
        draws=form is FULL_DROPOUT,
    )


def samples(sizes: Sequence[Size], dtypes: Sequence[torch.dtype], threads: Sequence[int]) -> Iterator[Sample]:
    """Measure all kinds of code side by side; each function is compiled once, for all sizes."""
    before = torch.get_num_threads()
    limits = torch._dynamo.config.patch(recompile_limit=100, fail_on_recompile_limit_hit=True)
    try:
        for dtype, training, form in itertools.product(dtypes, (False, True), (FULL, FULL_DROPOUT)):
            torch._dynamo.reset()
            functions = dict(_functions(form, training))
            for count, size in itertools.product(threads, sizes):
                torch.set_num_threads(count)
                with limits, torch.set_grad_enabled(training):
                    inputs = form.inputs(size, dtype, training)
                    calls = {kind: _step(f, inputs) for kind, f in functions.items()}
                    found = medians(interleaved(calls, REPEATS))
                yield Sample(work(form, size, dtype, training), str(size), count, found)
    finally:
        torch.set_num_threads(before)


def _functions(form: Form, training: bool) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    kinds = [UNFUSED, "fused"] + (["flex"] if form is FULL and not training else [])
    for kind in kinds:
        options = {"emitters": () if kind == UNFUSED else (kind,), "cost_model": False}
        yield kind, torch.compile(form.written, backend="sdpa_rewrite", dynamic=True, options=options)  # type: ignore[arg-type]
    if form.sdpa is not None:
        options = {"upgrade_calls": False}
        yield "sdpa", torch.compile(form.sdpa, backend="sdpa_rewrite", dynamic=True, options=options)  # type: ignore[arg-type]


def _step(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    def step() -> object:
        out = function(*inputs)
        leaves = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(out, leaves, torch.ones_like(out)) if leaves else out

    return step


def fitted(found: Sequence[Sample], kind: str) -> list[float]:
    """Nanoseconds of one thread for each of ``COUNTS``, none negative: the smallest squares of relative errors."""
    rows = [
        [n / (1 if k == 0 else s.threads) / s.seconds[kind] for k, n in enumerate(s.work.counts(kind != UNFUSED))]
        for s in found
    ]
    counts = torch.tensor(rows, dtype=torch.float64)
    best, least = [0.0] * len(COUNTS), math.inf
    for some in _subsets(len(COUNTS)):
        part = counts[:, some]
        solved = torch.linalg.lstsq(part, torch.ones(len(rows), 1, dtype=torch.float64), driver="gelsd").solution
        error = (part @ solved - 1).square().sum().item()
        if error < least and bool((solved >= 0).all()):
            least, best = error, [0.0] * len(COUNTS)
            for k, x in zip(some, solved.flatten().tolist(), strict=True):
                best[k] = float(f"{x * 1e9:.4g}")
    return best


def _subsets(n: int) -> Iterator[list[int]]:
    for count in range(1, n + 1):
        yield from map(list, itertools.combinations(range(n), count))


def table(found: Sequence[Sample]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Type, direction and kind of code -> costs."""
    out: dict[str, dict[str, dict[str, list[float]]]] = {}
    for s in found:
        direction = out.setdefault(s.work.dtype, {}).setdefault("training" if s.work.training else "forward", {})
        for kind in s.seconds:
            alike = [
                x
                for x in found
                if x.work.dtype == s.work.dtype and x.work.training == s.work.training and kind in x.seconds
            ]
            if kind not in direction:
                direction[kind] = fitted(alike, kind)
    return out


def check(found: Sequence[Sample]) -> Iterator[str]:
    """What was estimated beside what was measured, and what is chosen: a line for each sample, and a verdict."""
    yield f"{'':40} {'unfused us':>10} {'estimate':>9} {'fused us':>9} {'estimate':>9}  chosen"
    wrong = []
    for s in found:
        before = torch.get_num_threads()
        torch.set_num_threads(s.threads)
        a, b = (costs.estimate(s.work, kind) or math.nan for kind in (UNFUSED, "fused"))
        torch.set_num_threads(before)
        chosen = UNFUSED if costs.is_slower(b, a) else "fused"
        loss = s.seconds[chosen] / min(s.seconds[UNFUSED], s.seconds["fused"])
        kind = f"{'training' if s.work.training else 'forward'}{', dropout' if s.work.draws else ''} {s.work.dtype}"
        label = f"{kind} {s.size} {s.threads} thr"
        numbers = (s.seconds[UNFUSED] * 1e6, a * 1e6, s.seconds["fused"] * 1e6, b * 1e6)
        yield f"{label:40} {numbers[0]:10.0f} {numbers[1]:9.0f} {numbers[2]:9.0f} {numbers[3]:9.0f}  {chosen}" + (
            f", which is {loss:.2f}x as slow" if loss > costs.TOLERATED else ""
        )
        if loss > costs.TOLERATED:
            wrong.append(label)
    yield f"{len(found) - len(wrong)} of {len(found)} chosen right, or within 5%"


def calibrate(out: str | None, only_check: bool, dtypes: Sequence[torch.dtype], threads: Sequence[int]) -> int:
    """Measure and fit, write the costs to ``out``, and check them; or check those that hold."""
    sizes = SWEEP if only_check else SIZES
    found: list[Sample] = []
    for s in samples(sizes, dtypes, threads):
        print(f"{len(found) + 1}: {s.work.dtype} {s.size}", file=sys.stderr, flush=True)
        found.append(s)
    if only_check:
        print(*check(found), sep="\n")
        return 0
    text = json.dumps({instruction_set(): table(found)}, indent=1)
    path = Path(out or "costs.json")
    path.write_text(text + "\n")
    with config.patch(costs=str(path)):
        print(*check(found), sep="\n")
    print(f"written to {path}: SDPA_REWRITE_COSTS={path} or sdpa_rewrite.config.costs = {str(path)!r}")
    return 0
