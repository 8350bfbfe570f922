"""Fifty patterns cost what one costs: a place is looked at only by patterns that it may be."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import Pattern, pattern, patterns
from sdpa_rewrite.authoring import stage
from tests.authoring import forms
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


def test_fifty_patterns_are_asked_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = stage.regions_at

    def counting(lifted: Any, root: torch.fx.Node, closely: bool = False) -> Any:
        asked.append(lifted.name)
        return plain(lifted, root, closely)

    monkeypatch.setattr(stage, "regions_at", counting)

    def layers(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        for _ in range(3):
            q = forms.plain(q, k, v, g) * 0.5 + q
        return q

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
