"""What goes wrong when somebody writes a first pattern, and what he is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import Match, Pattern, PatternError, Scalar, config, pattern, patterns
from sdpa_rewrite.authoring.lifted import lifted_variant
from sdpa_rewrite.testing import Case, assert_misses, assert_rewrites, check_pattern
from sdpa_rewrite.testing.running import exactly
from tests.authoring import forms
from tests.authoring.test_declarations import K, Q, V

W = torch.randn(4, 4)


def outside(q: Q, k: K, v: V) -> Tensor:
    return ((q + torch.ones(1)) @ k.mT).softmax(-1) @ v * W.sum()


def branching(q: Q, k: K, v: V, scale: Scalar) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v * (scale if scale > 1 else 1.0)


def wrong_axis(q: Q, k: Annotated[Tensor, "b h j c"], v: V) -> Tensor:
    scores = q @ k
    return scores.softmax(-1) @ v


def unused(q: Q, k: K, v: V, gate: V) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def glued(q: Annotated[Tensor, "bhid"], k: K, v: V) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def silent(q: Q, k: K, v: V) -> None:
    (q @ k.mT).softmax(-1) @ v


def as_it_is(q: Q) -> Tensor:
    return q.transpose(1, 2)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (outside, "outside: it reads a tensor from outside; declare it as a parameter"),
        (branching, r"asks for a scalar's value; what Python decides upon is declared as a choice .*if scale > 1"),
        (
            wrong_axis,
            r"cannot be traced: .*\bd\b.* but got: .*\bj\b.*\(.*test_stumbles.py:.*scores = q @ k",
        ),
        (glued, r"glued: .*\(.*return \(q @ k.mT\).*\); declared are q: \[bhid\], k: \[b h j d\], v: \[b h j e\]"),
        (silent, "silent: its function returns no tensor"),
        (unused, "unused: gate is not used"),
        (as_it_is, "as_it_is: it computes nothing: its result is a parameter as it is"),
    ],
)
def test_a_function_that_is_no_pattern(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(PatternError, match=text) as told:
        lifted_variant(pattern(register=False)(function), 0)
    assert "\n" not in str(told.value)


def test_a_check_of_a_pattern_that_cannot_be_read_says_so() -> None:
    with pytest.raises(PatternError, match="wrong_axis: its function cannot be traced"):
        check_pattern(pattern(register=False)(wrong_axis))


def gated(replacement: Callable[..., Any], check: Callable[[Match], Any] | None = None, **options: Any) -> Pattern:
    made = pattern(register=False, **options)(forms.gated.function)
    made.replace(replacement)
    if check is not None:
        made.check(check)
    return made


def right(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, scale=scale) * gate.sigmoid()


def nothing(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: Any) -> Any:
    right(q, k, v, gate, scale)


def detached(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: Any) -> Any:
    return right(q, k, v, gate.detach(), scale)


def turned(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: Any) -> Any:
    return q @ k @ gate


def refusing(m: Match) -> bool:
    return False


def failing(m: Match) -> None:
    m["query"]


@pytest.mark.parametrize(
    ("made", "function", "reason"),
    [
        (
            gated(right),
            forms.tensor_scale,
            "the replacement failed: TypeError: scaled_dot_product_attention()",
        ),
        (gated(right), forms.tensor_scale, "scale=scale) * gate.sigmoid()); scale: a 0-d tensor here"),
        (gated(turned), forms.plain, "return q @ k @ gate); trusted=True skips this"),
        (gated(nothing), forms.plain, "result 0 of the replacement is a NoneType, not a tensor"),
        (gated(detached), forms.plain, "the gradient of gate: only the pattern has one"),
        (gated(right, refusing), forms.plain, "the check refusing returned False: it raises NoMatch to say no"),
        (gated(right, failing), forms.plain, "the check failing failed: KeyError: 'query'"),
        (gated(right, devices="cuda"), forms.plain, "q is on cpu, not on cuda"),
        (gated(right, dtypes=torch.float16), forms.plain, "q is torch.float32, not torch.float16"),
    ],
    ids=lambda x: "" if isinstance(x, Pattern) else None,
)
def test_a_replacement_or_check_that_is_wrong(made: Pattern, function: Callable[..., Any], reason: str) -> None:
    with config.patch(emitters=()):
        assert_misses(function, forms.tensors(grad=True), reason=reason, patterns=[made])


def test_gradients_are_compared_where_there_are_gradients() -> None:
    assert_rewrites(forms.plain, forms.tensors(), by="gated", patterns=[gated(detached)])


def test_what_cannot_run_in_float64_is_compared_with_eager_and_what_fails_there_is_not_hidden() -> None:
    """The judge of an error is float64: only a type that the code names may do without."""

    def casts(x: Tensor) -> Tensor:
        return x.float() @ x.mT

    def fails(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("out of luck")
        return x @ x.mT

    x = torch.randn(3, 4)
    eager: list[Tensor | None] = [torch.ones(3, 3)]
    assert exactly(casts, [x], eager) is eager
    assert exactly(torch.relu, [x], eager) is not eager
    with pytest.raises(RuntimeError, match="out of luck"):
        exactly(fails, [x], eager)


def test_a_pattern_may_cast_to_float32() -> None:
    """In float64 it is as good as float32, and so is its replacement; a replacement in bfloat16 is not."""

    @pattern(register=False)
    def precise(q: Q, k: K, v: V) -> Tensor:
        return (q @ k.mT).float().softmax(-1).type_as(q) @ v * 2.0

    @precise.replace
    def same(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0) * 2.0

    check_pattern(precise, cases=[Case(training=True), Case(torch.bfloat16)], near_misses=0)

    @precise.replace
    def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=1.0).type_as(q) * 2.0

    with pytest.raises(AssertionError, match="of the replacement differs from the pattern's by"):
        check_pattern(precise, cases=[Case()], near_misses=0)


def test_an_unknown_name_is_told_with_those_that_are_known() -> None:
    for asked in (patterns.describe, patterns.unregister):
        with pytest.raises(KeyError, match=r"no pattern 'casual' is .*; these are: .*causal"):
            asked("casual")


def test_a_pattern_without_a_docstring_is_described_by_its_name() -> None:
    @pattern(register=False)
    def terse(q: Q, k: K, v: V) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    first, *rest = patterns.describe(terse).splitlines()
    assert first == "terse"
    assert rest
