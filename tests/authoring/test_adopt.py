"""Torch's own attention patterns, with the arguments that torch registers them with."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.fx_passes import fuse_attention

from sdpa_rewrite import Pattern, PatternError, config, explain, patterns
from sdpa_rewrite.testing import Case, assert_misses, assert_rewrites, check_pattern
from tests.authoring import forms

# the masks of 15, 17 and 20 are 0 or 1, which only their replacements know; 29 and 30 spell out a safe softmax
NUMBERS = [n for n in range(1, 31) if n not in (15, 17, 20, 29, 30)]
IN_HALF = (7, 8, 9, 10)  # they cast to float16 by name


@functools.cache
def registered() -> dict[int, dict[str, Any]]:
    """The arguments of the first registration of each pattern (for training, where there is one), by number."""
    found: dict[int, dict[str, Any]] = {}
    for key, arguments in fuse_attention._get_sfdp_patterns(torch.device("cpu")):
        found.setdefault(int(key.split("_")[3]), arguments)
    return found


def adopted(number: int, **changes: Any) -> Pattern:
    if number not in registered():
        pytest.skip(f"this torch has no pattern {number}")
    wanted = ("search_fn", "replace_fn", "example_inputs", "scalar_workaround", "extra_check")
    given = {k: registered()[number][k] for k in wanted} | changes
    return patterns.adopt(name=f"sfdp_{number}", register=False, **given)


@pytest.mark.parametrize("number", NUMBERS)
def test_it_is_adopted_and_right_where_nothing_is_dropped(number: int) -> None:
    dtype = torch.float16 if number in IN_HALF else torch.float32
    check_pattern(adopted(number), cases=[Case(dtype), Case(dtype, training=True)], near_misses=1)


@pytest.mark.parametrize("number", [15, 17, 20])
def test_a_replacement_that_is_right_for_some_masks_only_is_refused(number: int) -> None:
    with pytest.raises(AssertionError, match="result 0 of the replacement differs from the pattern's by"):
        check_pattern(adopted(number), cases=[Case()], near_misses=0)


@pytest.mark.parametrize("number", [29, 30])
def test_a_safe_softmax_that_is_spelled_out_is_not_proved(number: int) -> None:
    with pytest.raises(AssertionError, match=r"it does not match its own trace: sfdp_\d+ \(100% of it found\)"):
        check_pattern(adopted(number), cases=[Case(training=True)], near_misses=0)


def test_what_is_one_axis_is_found_where_tensors_are_viewed_by_each_others_sizes() -> None:
    axes = {p.name: p.axes for p in adopted(24).parameters}
    assert axes["key"] == axes["value"]
    assert [a == b for a, b in zip(axes["query"], axes["key"], strict=True)] == [True, True, False, True]


def in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What torch 2.11 has as pattern 10: its values have to be float16."""
    return (q @ k.transpose(-2, -1)).to(torch.float32).softmax(-1).to(torch.float16) @ v


def test_what_multiplies_a_tensor_by_float16_is_of_that_type() -> None:
    examples = [torch.empty(2, 4, 8, 16)] * 3
    made = patterns.adopt(in_half, in_half, examples, name="in_half", register=False)
    assert {p.dtype for p in made.parameters} == {torch.float16}
    check_pattern(made, cases=[Case(torch.float16), Case(torch.float16, training=True)], near_misses=1)


def dropping(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return F.dropout(((q @ k.mT) / 3.0).softmax(-1), p) @ v


@pytest.mark.parametrize(("p", "by"), [(0.0, "pattern sfdp_3"), (0.1, "fused")])
def test_places_with_dropout_are_left_to_the_engine_which_keeps_the_mask(p: float, by: str) -> None:
    args = [torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3)]
    with patterns.scope(adopted(3)), config.patch(cost_model=False):
        sites = explain(dropping, *args, p).sites
    assert (sites[0].status, sites[0].emitter) == ("fused", by)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) / q.mean()).softmax(-1) @ v


def test_a_check_sees_the_nodes_that_torch_would_see() -> None:
    """Pattern 1 asks that the second argument of its division is a number."""
    with config.patch(emitters=()):
        assert_misses(scaled, forms.tensors()[:3], reason="fn says no", patterns=[adopted(1)])
        assert_misses(scaled, forms.tensors()[:3], reason="never says no", patterns=[adopted(1, extra_check=never)])


def never(match: Any) -> bool:
    divisor = next(n for n in match.nodes if n.target is torch.ops.aten.div.Tensor).args[1]
    assert divisor is match.kwargs["inv_scale"]
    assert match.kwargs["query"].meta["val"].shape == (2, 3, 7, 4)
    assert divisor.meta["val"].dim() == 0
    return False


def leaky(q: Any, k: Any, v: Any, slope: Any) -> Any:
    return F.leaky_relu(q @ k.transpose(-2, -1), slope) @ v


def adopted_here(search: Any) -> Pattern:
    examples = [torch.empty(2, 4, 8, 16)] * 3
    return patterns.adopt(search, search, examples, scalar_workaround={"slope": 0.1}, name="search", register=False)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_an_operator_that_takes_a_number_is_matched_with_any(grad: bool, dynamic: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.leaky_relu(q @ k.mT, 0.2) @ v

    made, args = adopted_here(leaky), [torch.randn(2, 3, 8, 6, requires_grad=grad) for _ in range(3)]
    assert_rewrites(function, args, by="search", patterns=[made], dynamic=dynamic)


def test_a_replacement_that_wants_a_number_gets_no_tensor() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        s = q @ k.mT
        return torch.where(s > 0, s, s * slope) @ v

    args = [*(torch.randn(2, 3, 8, 6) for _ in range(3)), torch.tensor(0.2)]
    assert_misses(function, args, reason="the replacement failed", patterns=[adopted_here(leaky)])


@pytest.mark.parametrize(
    ("scores", "operator"),
    [
        (lambda s, slope: F.elu(s, slope), "elu"),
        (lambda s, slope: torch.add(s, s.tanh(), alpha=slope), "add"),
        (lambda s, slope: F.hardtanh(s, -1.0, slope), "hardtanh"),
        (lambda s, slope: F.layer_norm(s, (8,), eps=slope), "layer_norm"),
        (lambda s, slope: s * float(slope), "__float__"),
    ],
    ids=["elu", "alpha", "hardtanh", "layer_norm", "float"],
)
def test_a_number_that_cannot_be_left_open_is_told(scores: Any, operator: str) -> None:
    def search(q: Any, k: Any, v: Any, slope: Any) -> Any:
        return scores(q @ k.transpose(-2, -1), slope) @ v

    with pytest.raises(PatternError, match=rf"search: {operator} takes slope as a number .*test_adopt.py:\d+.*lambda"):
        adopted_here(search)


def test_a_scalar_that_makes_another_operator_of_a_number_is_refused() -> None:
    def search(q: Any, k: Any, v: Any, slope: Any) -> Any:
        return (q @ k.transpose(-2, -1)).pow(slope) @ v

    with pytest.raises(PatternError, match=r"search: with numbers \(slope=0.1\) it is another form: .*pow"):
        adopted_here(search)
