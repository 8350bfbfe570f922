"""Whatever fails, in whatever stage: the graph is what it was, and so are the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import adjoint, analyse, match, pipeline, prove, report, rewrite
from sdpa_rewrite.emit import fused
from sdpa_rewrite.outcome import Outcome
from tests.harness import compiled

STAGES: list[tuple[Any, str]] = [
    (match, "candidates"),
    (analyse, "lift"),
    (analyse, "site_of"),
    (adjoint, "complete"),
    (prove, "forward"),
    (pipeline, "form_of"),
    (pipeline, "choose"),
    (fused.Fused, "reasons_against"),
    (pipeline, "bytes_avoided"),
    (fused.Fused, "emit"),
    (rewrite, "settled"),
    (rewrite, "trace"),
    (rewrite, "insert"),
    (rewrite, "carried"),
    (rewrite, "check"),
    (rewrite.Splice, "move_readers"),
    (rewrite, "unread"),
]
IDS = [f"{getattr(where, '__name__', where)}.{name}" for where, name in STAGES]


class Broken(Exception):
    """What the stages are made to raise."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * 0.3 + torch.where(mask, 0.0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()


def inputs() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, generator=g, requires_grad=True) for n in (5, 7, 7))
    return q, k, v, torch.rand(5, 7, generator=g) > 0.2


def run(f: Callable[..., Tensor]) -> list[Tensor]:
    *qkv, mask = inputs()
    out = f(*qkv, mask)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), qkv)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The printed code of each graph before and after the pipeline, with how often each value is read."""
    seen: list[tuple[str, str]] = []
    plain = pipeline.rewrite_graph

    def printed(graph: torch.fx.Graph) -> str:
        readers = [f"{node.name} {len(node.users)} {sorted(node.meta)}" for node in graph.nodes]
        names = sorted(name for name, _ in graph.owning_module.named_children())
        attributes = sorted(name for name in vars(graph.owning_module) if name.startswith("sdpa_rewrite"))
        return "\n".join([graph.python_code("self").src, *readers, *names, *attributes])

    def watched(graph: torch.fx.Graph) -> tuple[Outcome, ...]:
        before = printed(graph)
        try:
            return plain(graph)
        finally:
            graph.lint()
            seen.append((before, printed(graph)))

    monkeypatch.setattr(pipeline, "rewrite_graph", watched)
    return seen


def test_the_watched_program_is_fused_when_nothing_fails(graphs: list[tuple[str, str]]) -> None:
    run(compiled(attention))
    assert all(before != after for before, after in graphs)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise Broken("injected")


@pytest.mark.parametrize(("where", "name"), STAGES, ids=IDS)
@pytest.mark.parametrize("training", [False, True])
def test_a_stage_that_raises_changes_nothing(
    where: Any, name: str, training: bool, graphs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, broken)
    *qkv, mask = inputs()
    with report.collect() as collected, torch.set_grad_enabled(training):
        f = compiled(attention, strict=False)
        ours = run(f) if training else [f(*qkv, mask)]
    assert graphs
    for before, after in graphs:
        assert before == after
    theirs = run(attention) if training else [attention(*qkv, mask)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    told = collected.failures + [str(r) for o in collected.sites for r in o.reasons]
    assert any("injected" in text for text in told)
    assert not any(o.status == "fused" for o in collected.sites)


def test_failing_late_in_the_commit_puts_the_first_moves_back(
    graphs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output's readers have moved already when those of the second gradient fail."""
    plain, calls = rewrite.Splice.move_readers, []

    def third_fails(self: rewrite.Splice, old: torch.fx.Node, new: torch.fx.Node) -> None:
        calls.append(old)
        if len(calls) == 3:
            raise Broken("injected")
        plain(self, old, new)

    monkeypatch.setattr(rewrite.Splice, "move_readers", third_fails)
    ours = run(compiled(attention, strict=False))
    assert len(calls) == 3
    assert all(before == after for before, after in graphs)
    for a, b in zip(ours, run(attention), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_a_refused_replacement_is_taken_out_again(
    graphs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fused.Fused.emit

    def in_float64(self: fused.Fused, site: Any, inputs: Any) -> Any:
        out, dims = plain(self, site, inputs)
        return out.to(torch.float64), dims

    monkeypatch.setattr(fused.Fused, "emit", in_float64)
    with report.collect() as collected:
        run(compiled(attention))
    assert all(before == after for before, after in graphs)
    assert "has dtype torch.float64 instead of torch.float32" in str(collected.sites[0].reasons[-1])


def test_another_site_of_the_graph_is_still_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = rewrite.check, []

    def first_fails(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise Broken("injected")
        plain(*args, **options)

    monkeypatch.setattr(rewrite, "check", first_fails)

    def twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(attention(q, k, v, mask).transpose(1, 2), k, v, mask)

    with report.collect() as collected:
        ours = run(compiled(twice, strict=False))
    assert sorted(o.status for o in collected.sites) == ["fused", "recognised"]
    for a, b in zip(ours, run(twice), strict=True):
        torch.testing.assert_close(a, b)
