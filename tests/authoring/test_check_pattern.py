"""The suite that ``check_pattern`` makes can fail, and counts only what is a near miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import Pattern, Scalar, config, pattern, testing
from sdpa_rewrite.authoring import region, registry, stage
from sdpa_rewrite.authoring.lifted import lifted_variant
from sdpa_rewrite.authoring.mutation import mutants
from sdpa_rewrite.testing import Case, assert_misses, assert_rewrites, assertions, check_pattern, suite
from tests.authoring import forms
from tests.authoring.test_declarations import K, Q, V

ONE = [Case(training=True)]


def tripled(factor: float = 3.0, trusted: bool = False) -> Pattern:
    @pattern(register=False, trusted=trusted, name="tripled")
    def made(q: Q, k: K, v: V) -> Tensor:
        """Three times an attention."""
        return (q @ k.mT).softmax(-1) @ v * 3.0

    @made.replace
    def replaced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[-1] != v.shape[-1]:
            return (k @ q.mT).mT.softmax(-1) @ v * factor
        return F.scaled_dot_product_attention(q, k, v, scale=1.0) * factor

    return made


class Attention(torch.nn.Module):
    """An attention with a gate, whose input needs no gradient: its parameters do."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = gate
        self.project = torch.nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g = self.project(x).unflatten(-1, (4, 1, 4)).movedim(-3, 0).transpose(-2, -3)
        return ((q @ k.mT) * 0.3).softmax(-1) @ v * self.gate(g)


def test_a_module_may_be_asserted_about() -> None:
    x = torch.randn(2, 6, 8)
    told = assert_rewrites(Attention(torch.sigmoid), [x], by="gated", patterns=[forms.gated])
    assert told.sites[0].training
    with config.patch(cost_model=False):  # the engine takes what the pattern does not
        assert_misses(Attention(torch.tanh), [x], reason="no sigmoid", by="gated", patterns=[forms.gated])
    with config.patch(cost_model=False), pytest.raises(AssertionError, match="rewritten"):
        assert_misses(Attention(torch.tanh), [x], patterns=[forms.gated])


def test_the_gradients_of_a_modules_parameters_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention(torch.sigmoid)
    monkeypatch.setattr(assertions, "compiled", lambda fn, dynamic: WithoutGradients(fn))
    with pytest.raises(AssertionError, match="value 1: an error of"):
        testing.compare(model, [torch.randn(2, 6, 8)])


class WithoutGradients(torch.nn.Module):
    """A wrong compilation: a gradient of zero."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out.detach() + 0.0 * out


def test_how_much_was_tried_is_told() -> None:
    done = check_pattern(tripled(), cases=ONE, near_misses=5)
    assert (done.cases, done.near_misses, done.declared) == (1, 5, 0)


def test_a_wrong_replacement_that_is_trusted_fails() -> None:
    with pytest.raises(AssertionError, match="float32, training, static, batch 2, contiguous: value 0: an error of"):
        check_pattern(tripled(3.5, trusted=True), cases=ONE, near_misses=0)


def test_a_wrong_replacement_that_is_not_trusted_is_no_match() -> None:
    with pytest.raises(AssertionError, match="not rewritten: result 0 of the replacement differs"):
        check_pattern(tripled(3.5), cases=ONE, near_misses=0)


def test_what_keeps_it_from_matching_itself_is_told() -> None:
    @pattern(register=False)
    def powers(q: Q, k: K, v: V, exponent: Scalar) -> Tensor:
        return (q @ k.mT).relu().pow(exponent) @ v

    powers.replace(lambda q, k, v, exponent: powers(q, k, v, exponent))
    with pytest.raises(AssertionError, match=r"not match its own trace: powers .*no pow .*in the pattern: .*exponent"):
        check_pattern(powers, cases=ONE, near_misses=0)


def test_a_near_miss_that_is_the_form_fails() -> None:
    made = tripled()
    made.near_miss("nothing")(lambda q, k, v: 3.0 * ((q @ k.mT).softmax(-1) @ v))
    with pytest.raises(AssertionError, match="near miss: nothing: taken for the form"):
        check_pattern(made, cases=(), near_misses=0)


def test_a_near_miss_that_is_rewritten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of numbers, and without the proof, another factor is taken for the pattern's."""
    monkeypatch.setattr(region, "equal", lambda a, b: True)
    monkeypatch.setattr("sdpa_rewrite.authoring.unify.may_equal", lambda a, b: True)
    monkeypatch.setattr(stage.certify, "forward", lambda region: None)
    monkeypatch.setattr(stage.adjoint, "backward", lambda region, order: stage.Backward((None,)))
    with pytest.raises(AssertionError, match="near miss: another number in mul"):
        check_pattern(tripled(), cases=(), near_misses=40)


def test_an_equivalent_mutant_is_no_near_miss() -> None:
    inputs = suite.arguments(forms.gated.variants[0], ONE[0], {"scale": 0.5})
    every = {m.what for m in mutants(lifted_variant(forms.gated, 0))}
    other = {m.what for m in suite._others(forms.gated, inputs, 0)}
    equivalent = {"rescale exp", "negate exp", "double exp", "leave out sub"}  # softmax does not see it
    assert equivalent <= every
    assert not equivalent & other
    assert {"another operator for sigmoid", "detach bmm", "also return div"} <= other


def test_a_small_form_has_twenty_near_misses_too() -> None:
    @pattern(register=False)
    def small(q: Q, k: K, v: V) -> Tensor:
        return (q @ k.mT).relu() @ v

    inputs = suite.arguments(small.variants[0], ONE[0], {})
    assert len(list(suite._others(small, inputs, 0))) >= 20


def test_programs_are_put_into_mutants() -> None:
    returned = registry._registered["returned_probabilities"]
    inputs = suite.arguments(returned.variants[0], ONE[0], {})
    mutant = next(m for m in suite._others(returned, inputs, 0) if m.what.startswith("negate"))
    assert all(torch.isfinite(x).all() for x in mutant.function(**inputs))
