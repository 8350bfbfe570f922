"""Where a pattern nearly matches, ``explain`` tells what is in the way, with the lines of program and pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import Pattern, Scalar, config, explain, pattern, patterns
from tests.authoring import forms
from tests.authoring.forms import tensors
from tests.authoring.test_declarations import K, Q, V, padded


@pattern(register=False)
def stepwise(q: Q, k: K, v: V, gate: V, scale: Scalar) -> Tensor:
    """Written in lines, so that a line tells which of its operators is meant."""
    scores = (q @ k.mT) * scale
    probabilities = scores.softmax(-1)
    output = probabilities @ (v + gate)
    return output.relu() * 2.0


stepwise.replace(lambda q, k, v, gate, scale: stepwise(q, k, v, gate, scale))


def another_operator(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    p = ((q @ k.mT) * 0.3).softmax(-1)
    out = (p @ (v + g)).tanh()
    return out * 2.0


def another_number(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    p = ((q @ k.mT) * 0.3).softmax(-1)
    out = torch.relu(p @ (v + g))
    return out * 3.0


def another_axis(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s = (q @ k.mT) * 0.3
    p = s.softmax(1)
    return torch.relu(p @ (v + g)) * 2.0


def no_sum(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    p = ((q @ k.mT) * 0.3).softmax(-1)
    values = v * g
    return torch.relu(p @ values) * 2.0


def another_reader(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    s = (q @ k.mT) * 0.3
    logged = s.sum(-1)
    return torch.relu(s.softmax(-1) @ (v + g)) * 2.0, logged


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("function", "found", "told", "theirs", "ours"),
    [
        (another_operator, 90, "relu: expected relu(", "out = (p @ (v + g)).tanh()", "return output.relu() * 2.0"),
        (
            another_number,
            100,
            "times the number 3.0, not 2.0",
            "return out * 3.0",
            "return output.relu() * 2.0",
        ),
        (
            another_axis,
            100,
            "an axis of size 3 is in q, k, v",
            "p = s.softmax(1)",
            "probabilities = scores.softmax(-1)",
        ),
        (no_sum, 75, "sum: expected v[b h j e] + gate[b h j e], got mul", "values = v * g", "output = probabilities"),
        (another_reader, 100, "is also read by", "s = (q @ k.mT) * 0.3", "return output.relu() * 2.0"),
    ],
)
def test_what_is_in_the_way(
    function: Callable[..., Any], found: int, told: str, theirs: str, ours: str, grad: bool
) -> None:
    q, k, v, g = (torch.randn(2, 3, n, 4, requires_grad=grad) for n in (7, 5, 5, 5))
    text = nearest(stepwise, function, q, k, v, g)
    name, _, rest = text.partition(" (")
    assert name == "stepwise"
    assert found <= int(rest.split("%")[0]) <= 100
    assert told in text
    assert f"test_diagnosis.py:{line_of(function, theirs)} in {function.__name__}: {theirs}" in text
    assert f"in the pattern: {__file__}:{line_of(stepwise.function, ours)} in stepwise: {ours}" in text


def nearest(p: Pattern, function: Callable[..., Any], *args: Any) -> str:
    """What ``explain`` tells of the one candidate of ``function``."""
    with patterns.scope(p), config.patch(emitters=()):
        report = explain(function, *args)
    (site,) = report.sites
    assert f"nearest pattern: {site.details['nearest pattern']}" in str(report)
    return str(site.details["nearest pattern"])


def line_of(function: Callable[..., Any], text: str) -> int:
    """The line of this file in which ``function`` has ``text``."""
    start = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    return next(n for n in range(start, len(lines)) if text in lines[n - 1])


def test_numbers_are_told_with_their_own_line() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = (q @ k.mT) / 3
        return s.masked_fill(~keep[:, None, None, :], -math.inf).softmax(-1) @ v * 2.0

    text = nearest(padded, function, *tensors()[:3], torch.rand(2, 5) > 0.3)
    assert "the number 0.3333333333333333 where the pattern has 0.5" in text
    assert "in function: s = (q @ k.mT) / 3" in text
    assert "in padded: s = (q @ k.mT) * q.shape[-1] ** -0.5" in text


def test_the_nearest_of_several_is_told() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.3).softmax(-1) @ v * g.tanh()

    with patterns.scope(stepwise):
        text = nearest(forms.gated, function, *tensors())
    assert text.startswith("gated (92% of it found): sigmoid: expected sigmoid(gate[b h i e]), got tanh")


def test_a_scalar_that_should_be_a_tensor_is_told() -> None:
    @pattern(register=False)
    def mistaken(q: Q, k: K, v: V, gate: Scalar) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v * torch.sigmoid(gate)  # type: ignore[arg-type]

    mistaken.replace(lambda q, k, v, gate: mistaken(q, k, v, gate))
    q, k, v, g = tensors()
    text = nearest(mistaken, lambda q, k, v, g: (q @ k.mT).softmax(-1) @ v * g.sigmoid(), q, k, v, g)
    assert "gate: expected gate, got input arg3_1: gate is declared a scalar, and this is none" in text


def test_an_authors_own_pattern_is_told_where_the_engine_fuses() -> None:
    """He wanted it for this place; a pattern of the library that is as near is no news there."""

    @pattern(register=False)
    def masked(q: Q, k: K, v: V, gate: V, mask: Annotated[Tensor, "i j"], scale: Scalar) -> Tensor:
        return ((q @ k.mT) * scale + mask).softmax(-1) @ (v * gate.sigmoid())

    masked.replace(lambda q, k, v, gate, mask, scale: masked(q, k, v, gate, mask, scale))

    def without_mask(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.3).softmax(-1) @ (v * g.sigmoid())

    q, k, v, g = (torch.randn(2, 3, n, 4) for n in (7, 5, 5, 5))
    with config.patch(cost_model=False):
        (unasked,) = explain(without_mask, q, k, v, g).sites
        with patterns.scope(masked):
            (site,) = explain(without_mask, q, k, v, g).sites
    assert site.status == unasked.status == "fused"
    assert "nearest pattern" not in unasked.details
    assert "no sum of this many parts" in site.details["nearest pattern"]


def test_a_form_of_fewer_results_is_no_near_miss() -> None:
    """Attention alone is no ``returned_probabilities`` that lacks something."""
    assert "returned_probabilities" not in nearest(
        forms.gated, lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *tensors()[:3]
    )


def test_each_candidate_is_told_something() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return (q @ k.mT).softmax(-2) @ v, ((q @ k.mT) * 3.0).softmax(1) @ v

    with config.patch(emitters=()):
        report = explain(function, *tensors())
    assert len(report.sites) == 2
    assert all(site.details["nearest pattern"] for site in report.sites)
