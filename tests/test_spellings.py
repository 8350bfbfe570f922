"""Spellings that were once missed, as programs of ``tests.programs``: recognised, right, and told of once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import judge, reasons, same_as_eager, statuses
from tests.programs import Program

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def outcomes(**fields: Any) -> list[str]:
    verdict = judge(Program(**fields))
    assert not verdict.wrong
    return [o.status for o in verdict.outcomes]


@pytest.mark.parametrize("grads", ["q", "k", "v", "all"])
def test_training_under_autocast(grads: str) -> None:
    """Query and key are casts to half of what is kept; the gradients pass through the same casts."""
    assert outcomes(autocast=True, grads=grads) == ["fused"]


@pytest.mark.parametrize("grads", ["none", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential_of_a_log_softmax(dtype: torch.dtype, grads: str) -> None:
    """In half there is a cast between; the backward computes the probabilities again, which is no second site."""
    assert outcomes(softmax="log_softmax", dtype=dtype, grads=grads) == ["fused"]


@pytest.mark.parametrize("grads", ["none", "all"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("keep", ["none", "rows"])
def test_nan_to_num_of_the_probabilities(keep: str, autocast: bool, grads: str) -> None:
    """A probability is never infinite, so that replacing infinities hides no condition that was not seen."""
    assert outcomes(softmax="nan_to_num", keep=keep, autocast=autocast, grads=grads) == ["fused"]


@pytest.mark.parametrize("softmax", ["softmax", "sink"])
@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_by_the_generator_of_eager(softmax: str, autocast: bool) -> None:
    """``fallback_random`` keeps ``native_dropout`` in the graph."""
    verdict = judge(Program(weight="dropout", softmax=softmax, autocast=autocast, grads="all"))
    assert not verdict.wrong
    (site,) = verdict.outcomes
    assert site.status == "recognised"
    assert site.form is not None
    assert site.form.dropout == 0.25
    (reason,) = site.reasons
    assert "torch's own generator draws the dropout mask" in reason.text
    assert (reason.role, reason.node) == ("weight", "getitem_1")
    assert "F.dropout" in reason.source


def test_dropout_by_the_generator_of_eager_without_a_backward() -> None:
    verdict = judge(Program(weight="dropout"))
    assert not verdict.wrong
    (site,) = verdict.outcomes
    assert site.status == "missed"
    assert "does not keep the dropout's mask" in site.reasons[0].text


def test_dropout_by_the_generator_of_eager_in_two_layers() -> None:
    """The second layer is a repetition of the first; its mask is its own."""

    def attention(x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.dropout((x @ x.mT * 0.3).softmax(-1), 0.1) @ x
        return x

    with torch._inductor.config.patch(fallback_random=True):
        told = same_as_eager(attention, torch.randn(2, 3, 8, 4, requires_grad=True))
    assert statuses(told) == ["recognised", "recognised"], reasons(told)
    assert len({r.node for o in told.sites for r in o.reasons}) == 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sink_that_is_split_off(dynamic: bool, grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        joined = torch.cat([q @ k.mT * 0.3, sink.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)], -1)
        p, _ = joined.softmax(-1).split([k.shape[2], 1], -1)
        return p @ v

    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=grad) for n in (6, 7, 7))
    told = same_as_eager(attention, q, k, v, torch.randn(4, requires_grad=grad), dynamic=dynamic)
    assert statuses(told) == ["fused"], reasons(told)
    assert told.sites[0].form is not None
    assert told.sites[0].form.softmax == "softmax with sink"


@pytest.mark.parametrize("grads", ["none", "all"])
@pytest.mark.parametrize("apply", ["add", "multiply"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_finite_mask_under_the_scale(dtype: torch.dtype, apply: str, grads: str) -> None:
    """A row that is masked as a whole is softmax of scores rounded to 1e-7: rounding is no difference of meaning."""
    order = ("bias", "cap", "mask", "scale")
    shape = (2, 4, 9, 5, 8, 8)
    fields = {"shape": shape, "order": order, "keep": "offset", "apply": apply, "fill": "-1e9", "seed": 33269}
    assert outcomes(dtype=dtype, grads=grads, **fields) == ["fused"]
