"""Fifty patterns cost what one costs: a place is looked at only by patterns that it may be, and read once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import Pattern, pattern, patterns
from sdpa_rewrite.authoring import stage
from sdpa_rewrite.authoring.describe import diagnosis
from sdpa_rewrite.authoring.lifted import lifted_variants
from sdpa_rewrite.lift.lifter import Lifter
from tests import pattern_cost
from tests.authoring import forms
from tests.authoring.test_diagnosis import stepwise
from tests.joint import with_graph


def made(n: int) -> Pattern:
    @pattern(register=False, name=f"form_{n}")
    def form(
        q: Annotated[Tensor, "b h i d"],
        k: Annotated[Tensor, "b h j d"],
        v: Annotated[Tensor, "b h j e"],
        gate: Annotated[Tensor, "b h i e"],
    ) -> Tensor:
        return ((q @ k.mT) * (n + 2.5)).softmax(-1) @ v * gate.tanh()

    return form


def layers(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    for _ in range(3):
        q = forms.plain(q, k, v, g) * 0.5 + q
    return q


def test_fifty_patterns_are_asked_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = stage.regions_at

    def counting(lifted: Any, *place: Any, **how: Any) -> Any:
        asked.append(lifted.name)
        return plain(lifted, *place, **how)

    monkeypatch.setattr(stage, "regions_at", counting)

    def count(graph: torch.fx.Graph) -> tuple[int, int]:
        found = []
        for some in (1, 50):
            asked.clear()
            with patterns.scope(*map(made, range(some))):
                stage.apply(graph)
            found.append(len(asked))
        return found[0], found[1]

    one, fifty = with_graph(count, layers, *forms.tensors(grad=True))
    assert fifty <= 1.2 * one


@pytest.mark.parametrize("kind", pattern_cost.KINDS)
def test_a_place_is_read_once_for_all_the_patterns_that_it_may_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns of the program's own operators, which differ in a number only, are asked everywhere."""
    forms_of_kind = [pattern_cost.KINDS[kind](n) for n in range(50)]
    for each in forms_of_kind:
        list(lifted_variants(each))
    read: list[torch.fx.Node] = []
    plain = Lifter._open

    def counting(self: Any, node: torch.fx.Node, *rest: Any) -> Any:
        read.append(node)
        return plain(self, node, *rest)

    monkeypatch.setattr(Lifter, "_open", counting)

    def count(graph: torch.fx.Graph) -> list[int]:
        found = []
        for some in (1, 50):
            read.clear()
            with patterns.scope(*forms_of_kind[:some]):
                told = stage.apply(graph)
            found.append(sum(n.graph is graph for n in read))  # a pattern's own trace is read, too
            assert len({n.pattern.name for n in told.near if kind in n.pattern.name}) == some  # each one was asked
        return found

    one, fifty = with_graph(count, layers, *forms.tensors())
    assert 0 < one <= fifty <= 1.2 * one


@pytest.mark.parametrize("function", [forms.flattened, forms.by_hand, forms.heads_last, forms.tensor_scale])
def test_what_is_told_of_a_pattern_does_not_depend_on_others(function: Callable[..., Tensor]) -> None:
    """They share what they read, and none sees what another one has looked at."""
    others = [made(n) for made in pattern_cost.KINDS.values() for n in range(2)]

    def tell(graph: torch.fx.Graph) -> tuple[list[Any], list[Any]]:
        told = []
        for some in ((), others):
            with patterns.scope(stepwise, *some):
                near = stage.apply(graph).near
            told.append([(diagnosis(n), n.covers, n.matched) for n in near if n.pattern.name == "stepwise"])
        return told[0], told[1]

    token = stage.thorough.set(True)
    try:
        alone, together = with_graph(tell, function, *forms.tensors())
    finally:
        stage.thorough.reset(token)
    assert alone
    assert alone == together
