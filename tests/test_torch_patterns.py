"""CASES W10: torch's own attention patterns take softmax over queries or heads for softmax over keys.

They are off in graphs that are ours, on in all others, and other users of the same lists keep working.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import fuse_attention, joint_graph
from torch._inductor.pattern_matcher import PatternMatcherPass

import sdpa_rewrite
from sdpa_rewrite import compat
from tests.conftest import inputs

pytestmark = pytest.mark.usefixtures("no_codegen")


def over(dim: int) -> Callable[..., torch.Tensor]:
    """Attention with its softmax over ``dim``; of the square scores (2, 3, 6, 6), 3 and -1 are the keys."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.2).softmax(dim) @ v

    return attend


def compiled_by_us(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(attend, backend="sdpa_rewrite")


def compiled_by_stock(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(attend)


def stock_hits() -> int:
    return int(counters["inductor"]["fuse_attention"])


@pytest.mark.parametrize("dim", [-1, -2, 1, 0])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", ["backend", "enabled"])
def test_softmax_over_any_axis_is_computed_as_written(dim: int, training: bool, way: str) -> None:
    attend = over(dim)
    tensors = inputs(2, 3, 6, 6, requires_grad=training)
    scope = sdpa_rewrite.enabled() if way == "enabled" else contextlib.nullcontext()
    with scope:
        compiled = compiled_by_us(attend) if way == "backend" else compiled_by_stock(attend)
        result = compiled(*tensors)
    torch.testing.assert_close(result, attend(*tensors))
    if training:
        weight = torch.randn_like(result)
        expected = torch.autograd.grad((attend(*tensors) * weight).sum(), tensors)
        torch.testing.assert_close(torch.autograd.grad((result * weight).sum(), tensors), expected)
    assert stock_hits() == 0


@pytest.mark.parametrize("training", [False, True])
def test_other_graphs_keep_torchs_patterns(training: bool) -> None:
    tensors = inputs(2, 3, 6, 6, requires_grad=training)
    compiled_by_us(over(-1))(*tensors)
    assert stock_hits() == 0
    compiled_by_stock(over(-1))(*tensors)
    assert stock_hits() > 0


def test_a_knob_keeps_torchs_patterns_in_ours() -> None:
    nothing_of_ours = {"emitters": ()}  # a site that we fuse would leave torch's pattern nothing to find
    with sdpa_rewrite.config.patch(keep_torch_patterns=True, **nothing_of_ours):
        compiled_by_us(over(-1))(*inputs(2, 3, 6, 6))
    assert stock_hits() == 1


def test_torchs_other_patterns_stay_on_in_ours() -> None:
    before = {name: len(entries(passes)) for name, passes in lists().items()}
    left = {name: len(entries(compat._without_attention(passes))) for name, passes in lists().items()}
    attention = {name: sum(map(compat.is_attention_pattern, entries(p))) for name, p in lists().items()}
    assert {name: before[name] - attention[name] for name in before} == left
    assert any(left.values())


def lists() -> dict[str, PatternMatcherPass]:
    joint_graph.lazy_init(torch.device("cpu"))
    numbered = {f"pass {i}": each for i, each in enumerate(joint_graph.pass_patterns)}
    return {"early": joint_graph.early_patterns, **numbered}


def entries(passes: PatternMatcherPass) -> list[Any]:
    return [entry for each in passes.patterns.values() for entry in each]


def searched_module(entry: Any) -> str:
    return getattr(compat._searched_function(entry), "__module__", "")


def test_torchs_attention_patterns_are_told_from_the_others() -> None:
    """By their names, and in 2.11, where they have none, by what they search for; both say the same."""
    everything = [entry for passes in lists().values() for entry in entries(passes)]
    found = [entry for entry in everything if compat.is_attention_pattern(entry)]
    assert len(found) > 20
    by_search = [e for e in everything if getattr(compat._searched_function(e), "__name__", "").startswith("_sfdp_")]
    assert by_search == found
    assert {searched_module(entry) for entry in found} <= {fuse_attention.__name__, "torch._inductor.pattern_matcher"}
    assert fuse_attention.__name__ not in {searched_module(entry) for entry in everything if entry not in found}


@pytest.fixture
def theirs() -> Iterator[Callable[[], list[torch.fx.Graph]]]:
    """Somebody else's ``apply`` on the first list, put there when called, with one argument; gives what it saw."""
    patterns = joint_graph.pass_patterns[0]
    before = vars(patterns).get("apply")

    def install() -> list[torch.fx.Graph]:
        seen: list[torch.fx.Graph] = []
        plain = type(patterns).apply

        def apply(gm: torch.fx.Graph) -> int:
            seen.append(gm)
            return plain(patterns, gm)

        patterns.apply = apply  # type: ignore[method-assign, assignment]
        return seen

    yield install
    if before is None:
        vars(patterns).pop("apply", None)
    else:
        patterns.apply = before  # type: ignore[method-assign]


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_others_may_replace_apply_too(first: str, theirs: Callable[[], list[torch.fx.Graph]]) -> None:
    tensors = inputs(2, 3, 6, 6)
    if first == "ours":
        compiled_by_us(over(-1))(*tensors)
    seen = theirs()
    result = compiled_by_us(over(-2))(*tensors)
    torch.testing.assert_close(result, over(-2)(*tensors))
    assert stock_hits() == 0
    compiled_by_stock(over(-1))(*tensors)
    assert (len(seen), stock_hits()) == (1, 1)


def test_marking_many_graphs_does_not_pile_up() -> None:
    for _ in range(3):
        compat.keep_torch_patterns_from(torch.fx.Graph())
    guard = vars(joint_graph.pass_patterns[0])["apply"]
    assert not isinstance(guard._before, type(guard))
