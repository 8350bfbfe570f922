"""An emitter that builds something else is found out before its replacement is put in; and what options leave alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import report, verify
from sdpa_rewrite.emit import masks, sdpa
from tests.harness import compiled, reasons, same_as_eager, statuses
from tests.test_cases_missed import qkv
from tests.test_cases_wrong import EMPTY_ROW


def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.3).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def changed(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    plain = sdpa.SDPA.emit

    def emit(self: sdpa.SDPA, site: Any, inputs: Any) -> Any:
        out, dims = plain(self, site, inputs)
        return change(out), dims

    return emit


@pytest.mark.parametrize(
    ("change", "grad", "text"),
    [
        (lambda x: x * 1.001, False, "the output of the replacement differs"),
        (lambda x: x + 1e-5, True, "the output of the replacement differs"),
        (lambda x: 2 * x - x.detach(), True, "the gradient of the key differs"),
        (lambda x: x.nan_to_num(), False, "the output of the replacement differs"),
    ],
)
def test_an_emitter_that_builds_something_else(
    change: Callable[[Tensor], Tensor], grad: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa.SDPA, "emit", changed(change))
    told = same_as_eager(attention, *qkv(grad=grad), EMPTY_ROW, emitters=("sdpa",))
    assert statuses(told) == ["recognised"]
    assert text in reasons(told)


def test_rows_masked_as_a_whole_are_among_the_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what ``masks`` does about them the replacement is refused."""
    plain = masks.masked

    def careless(*args: Any) -> masks.Masked:
        return dataclasses.replace(plain(*args), query=args[4], empty=None, share=None)

    monkeypatch.setattr(sdpa, "masked", careless)
    for grad in (False, True):
        told = same_as_eager(attention, *qkv(grad=grad), EMPTY_ROW, emitters=("sdpa",))
        assert statuses(told) == ["recognised"]


def test_nothing_is_verified_when_the_option_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> str:
        raise AssertionError("verified")

    monkeypatch.setattr(verify, "difference", forbidden)
    assert statuses(same_as_eager(attention, *qkv(), EMPTY_ROW, verify=False)) == ["fused"]


@pytest.mark.parametrize(
    ("forms", "fused"),
    [
        ((), True),
        (("inference",), False),
        (("training",), True),
        (("causal",), False),
        (("sliding window",), True),
        (("sink", "grouped"), True),
        (("float32",), False),
    ],
)
def test_disabled_forms_are_left_alone(forms: tuple[str, ...], fused: bool) -> None:
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) + torch.full((6, 6), -torch.inf).triu(1)).softmax(-1) @ v

    told = same_as_eager(causal, *qkv(), disabled_forms=forms)
    assert statuses(told) == ["fused" if fused else "recognised"]
    assert fused or "disabled_forms" in reasons(told)


@pytest.mark.parametrize("forms", [("dropout",), ("training",), ("sliding window",), ("sdpa", "sliding")])
def test_disabled_forms_go_by_the_words_of_explain(forms: tuple[str, ...]) -> None:
    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(6)[:, None], torch.arange(6)
        scores = (q @ k.mT).masked_fill((j > i) | (j < i - 2), -torch.inf)
        return torch.nn.functional.dropout(scores.softmax(-1), 0.1) @ v

    with report.collect() as told:
        compiled(windowed, disabled_forms=forms)(*qkv(grad=True))
    assert statuses(told) == ["recognised"]
    (reason,) = told.sites[0].reasons
    assert reason.text == f"config.disabled_forms has {forms[-1]!r}"
    assert told.sites[0].form is not None
    assert any(forms[-1] in word for word in (*report.describe(told.sites[0].form).split(", "), "training"))
