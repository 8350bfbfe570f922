"""What is measured: the suites, and the bars that ours must reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sdpa_rewrite.bench import forms
from sdpa_rewrite.bench.case import Bar, Case
from sdpa_rewrite.bench.forms import Form, Size
from sdpa_rewrite.bench.models import Bert, Block, Gpt, pair

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Scope:
    """What of a suite is wanted.  ``lengths`` stand in for the suite's own; ``quick``: small, to see that it runs."""

    dtypes: Sequence[torch.dtype] = DTYPES
    lengths: tuple[int, ...] = ()
    quick: bool = False

    def over(self, *own: int) -> tuple[int, ...]:
        """The lengths to measure, of a suite with these of its own."""
        return self.lengths or ((64,) if self.quick else own)

    def of(self, *sizes: Size) -> list[Size]:
        """The sizes to measure: those of the suite, or the first of them with the lengths that are wanted."""
        if self.lengths or self.quick:
            s = sizes[0]
            return [Size(s.batch, s.heads, n, s.depth) for n in self.over()]
        return list(sizes)

    def bars(self, size: Size, *bars: Bar) -> tuple[Bar, ...]:
        """The bars, where they are set: not at lengths of somebody's choice."""
        return () if self.lengths or self.quick else bars


def by_dtype(dtype: torch.dtype, single: float, half: float, against: str) -> Bar:
    """A bar on speed that depends on the type."""
    return Bar("speed", half if dtype == torch.bfloat16 else single, against)


def case(suite: str, form: Form, size: Size, dtype: torch.dtype, training: bool, bars: tuple[Bar, ...] = ()) -> Case:
    """A form on a size.  The backward has five products of the forward's two."""
    products = 7 if training else 2
    count = 2.0 * products * size.batch * size.heads * size.queries * size.columns * size.depth * form.seen
    return Case(
        suite=suite,
        form=form.name,
        shape=str(size),
        dtype=dtype,
        inputs=partial(form.inputs, size, dtype, training),
        written=form.written,
        sdpa=form.sdpa,
        flex=form.as_flex,
        training=training,
        length=size.columns,
        operations=count,
        bars=bars,
    )


def forward(scope: Scope) -> Iterator[Case]:
    """No mask and a causal one, and logits far apart, against torch's operator and the peak of the machine."""
    for dtype in scope.dtypes:
        for form in (forms.FULL, forms.CAUSAL):
            for size in scope.of(Size(1, 8, 2048, 64), Size(1, 8, 2048, 128)):
                bars = [by_dtype(dtype, 1.65, 3.3, "sdpa")]
                if form is forms.FULL and size.depth == 128:
                    bars.append(Bar("peak", 0.58 if dtype == torch.bfloat16 else 0.65))
                yield case("forward", form, size, dtype, False, scope.bars(size, *bars))
        for size in scope.of(Size(1, 8, 2048, 64)):
            bars = [by_dtype(dtype, 1.65, 3.3, "sdpa")]
            yield case("forward", forms.FULL_SHARP, size, dtype, False, scope.bars(size, *bars))


def training(scope: Scope) -> Iterator[Case]:
    """Forward and backward, against torch's operator; with dropout against stock torch.compile."""
    for dtype in scope.dtypes:
        for size in scope.of(Size(1, 8, 2048, 64), Size(4, 12, 512, 64), Size(1, 1, 4096, 64)):
            bars = scope.bars(size, by_dtype(dtype, 1.7, 2.3, "sdpa"))
            yield case("training", forms.CAUSAL, size, dtype, True, bars)
        for size in scope.of(Size(1, 8, 2048, 64)):
            bars = (Bar("speed", 5.0, "stock"), Bar("memory", 1 / 6, "stock")) if dtype == torch.float32 else ()
            yield case("training", forms.CAUSAL_DROPOUT, size, dtype, True, scope.bars(size, *bars))


def masks(scope: Scope) -> Iterator[Case]:
    """Masks as tensors and as programs, biases, a soft-cap."""
    for dtype in scope.dtypes:
        for size in scope.of(Size(1, 8, 2048, 64)):
            given = scope.bars(size, by_dtype(dtype, 2.5, 4.0, "sdpa"))
            capped = scope.bars(size, by_dtype(dtype, 1.7, 3.5, "flex"))
            yield case("masks", forms.BOOL_MASK, size, dtype, False, given)
            yield case("masks", forms.ADDITIVE_MASK, size, dtype, False, given)
            yield case("masks", forms.SOFT_CAP, size, dtype, False, capped)
            for form in (forms.SLIDING, forms.ALIBI):
                yield case("masks", form, size, dtype, False)
        for size in scope.of(Size(4, 8, 1024, 64)):
            yield case("masks", forms.PADDING, size, dtype, False)


def decode(scope: Scope) -> Iterator[Case]:
    """Few queries and many keys, with all heads of their own and in groups."""
    for dtype in scope.dtypes:
        for keys in scope.over(1024, 4096, 16384):
            for rows in (1,) if scope.quick else (1, 4, 16):
                yield case("decode", forms.FULL, Size(1, 32, rows, 128, keys, 8), dtype, False)
                yield case("decode", forms.FULL, Size(4, 8, rows, 64, keys), dtype, False)


def calls(scope: Scope) -> Iterator[Case]:
    """Attention that is a call already: ours is given the call, and is no slower than it."""
    for dtype in scope.dtypes:
        for size in scope.of(Size(1, 8, 2048, 64)):
            for form in (forms.FULL, forms.CAUSAL):
                for train in (False, True):
                    yield _called("sdpa", case("calls", form, size, dtype, train), scope, size)
            for form in (forms.CAUSAL, forms.SLIDING, forms.DOCUMENTS, forms.ALIBI, forms.SOFT_CAP):
                for train in (False, True):
                    yield _called("flex", case("calls", form, size, dtype, train), scope, size)


def _called(call: Literal["sdpa", "flex"], case: Case, scope: Scope, size: Size) -> Case:
    form = f"{case.form}, a call of {'SDPA' if call == 'sdpa' else 'FlexAttention'}"
    runs = call == "sdpa" or not case.training  # torch trains no FlexAttention on CPU
    bars = scope.bars(size, Bar("speed", 1 / 1.05, call if runs else "stock"))
    return replace(case, form=form, ours=call, bars=bars)


def short(scope: Scope) -> Iterator[Case]:
    """Where there is little to gain: never slower than stock by more than 5%."""
    settings = [
        (forms.FULL, 1, 8, 64),
        (forms.CAUSAL, 1, 8, 64),
        (forms.CAUSAL, 8, 12, 64),
        (forms.PADDING, 16, 4, 32),
    ]
    for dtype in scope.dtypes:
        for form, batch, heads, depth in settings[: 1 if scope.quick else None]:
            for n in scope.over(16, 32, 64, 128, 256, 512):
                size = Size(batch, heads, n, depth)
                for train in (False, True):
                    bars = scope.bars(size, Bar("speed", 1 / 1.05, "stock"))
                    yield case("short", form, size, dtype, train, bars)


def models(scope: Scope) -> Iterator[Case]:
    """A block of BERT and one of GPT-2, for inference and in training with dropout."""
    batch, width, heads = (2, 64, 4) if scope.quick else (4, 512, 8)
    for dtype in scope.dtypes:
        for kind in (Bert, Gpt):
            for tokens in scope.over(1024):
                for train in (False, True):
                    yield _model(kind, batch, tokens, width, heads, dtype, train)


def _model(kind: type[Block], batch: int, tokens: int, width: int, heads: int, dtype: torch.dtype, train: bool) -> Case:
    written, called = (x.train(train) for x in pair(kind, width, heads, forms.DROPOUT, dtype))

    def inputs() -> list[Tensor]:
        x = torch.randn(batch, tokens, width).to(dtype).requires_grad_(train)
        keys = torch.arange(tokens) < torch.linspace(tokens, tokens / 2, batch)[:, None]
        return [x, keys] if kind is Bert else [x]

    dropped = ", dropout 0.1" if train else ""
    return Case(
        suite="models",
        form=f"{kind.__name__} block{dropped}",
        shape=f"{batch}x{tokens}x{width} H={heads}",
        dtype=dtype,
        inputs=inputs,
        written=written,
        sdpa=called,
        training=train,
        compile_sdpa=True,
        length=tokens,
    )


SUITES: dict[str, Callable[[Scope], Iterator[Case]]] = {
    s.__name__: s for s in (forward, training, masks, decode, calls, short, models)
}
