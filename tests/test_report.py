"""Counters, log, trace artifact, the report's text and JSON, and ``explain``."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._logging

import sdpa_rewrite
from sdpa_rewrite import pipeline, report
from sdpa_rewrite.outcome import Form, Outcome, Reason
from sdpa_rewrite.report import Report
from tests.conftest import attention, inputs
from tests.harness import same_as_eager

FUSED = Outcome(
    status="fused",
    node="bmm_1",
    source="model.py:42 in attend: w = scores.softmax(-1)",
    training=True,
    form=Form(scale="1/8", mask="causal", gqa="4:1", dropout=0.1, dtype="float16", gradients=("q", "k", "v")),
    emitter="flex",
    bytes_avoided=3 * 2**20,
)
RECOGNISED = Outcome(
    status="recognised",
    node="bmm_3",
    source="model.py:60 in cross: return p @ v",
    form=Form(softmax="safe softmax", scale="d**(-1/2)", score=("tanh soft-cap 50",), weight=("post-mask",)),
    reasons=(Reason("sdpa: no soft-cap"), Reason("flex: inference only on CPU")),
)
MISSED = Outcome(
    status="missed",
    node="bmm_5",
    source="",
    reasons=(Reason("the scores are used elsewhere", "scores", "mul_7", "model.py:70 in f: log(s)"),),
)

TABLE = """\
4 attention sites in 2 graphs: 2 fused, 1 recognised, 1 missed; 6.0 MiB of score-sized tensors avoided
the pass failed on a graph: ValueError: oh

#  sites  outcome                graph             avoided  source
1  2      fused by flex          forward+backward  3.0 MiB  model.py:42 in attend: w = scores.softmax(-1)
   form: softmax, scale 1/8, mask causal, gqa 4:1, dropout 0.1, gradients of q, k, v, float16
2  1      recognised, not fused  forward           -        model.py:60 in cross: return p @ v
   form: safe softmax, scale d**(-1/2), mask none, score tanh soft-cap 50, weight post-mask
   why not: sdpa: no soft-cap
   why not: flex: inference only on CPU
3  1      missed                 forward           -        bmm_5
   why not: the scores are used elsewhere (role scores, node mul_7, line model.py:70 in f: log(s))"""


def test_text() -> None:
    assert str(Report((FUSED, RECOGNISED, FUSED, MISSED), ("ValueError: oh",), graphs=2)) == TABLE


def test_text_of_nothing() -> None:
    assert str(Report(graphs=1)) == "0 attention sites in 1 graph: 0 fused, 0 recognised, 0 missed"


def test_json() -> None:
    data = json.loads(Report((FUSED, MISSED), ("ValueError: oh",), graphs=2).to_json())
    assert (data["graphs"], data["failures"], len(data["sites"])) == (2, ["ValueError: oh"], 2)
    assert data["sites"][0]["form"]["gqa"] == "4:1"
    assert data["sites"][1]["reasons"][0]["node"] == "mul_7"


def test_json_writes_what_it_does_not_know_as_text() -> None:
    odd = Outcome("missed", "n", "", details={"dtype": torch.float16})
    assert json.loads(Report((odd,)).to_json())["sites"][0]["details"] == {"dtype": "torch.float16"}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**42, "4096.0 GiB")]
)
def test_bytes(count: int, text: str) -> None:
    assert report._bytes(count) == text


# -- counters, log, trace ------------------------------------------------------------------------------------


def test_counters(counted: Callable[[], Counter[str]]) -> None:
    report.record((FUSED, FUSED, RECOGNISED, MISSED))
    report.record(())
    assert counted() == {
        "graphs": 2,
        "fused": 2,
        "recognised": 1,
        "missed": 1,
        "fused: flex": 2,
        "recognised: sdpa: no soft-cap": 1,
        "recognised: flex: inference only on CPU": 1,
        "missed: the scores are used elsewhere": 1,
    }


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sdpa_rewrite"):
        report.record((FUSED, RECOGNISED))
    assert [record.getMessage() for record in caplog.records if record.name == "sdpa_rewrite"] == [
        "fused by flex: model.py:42 in attend: w = scores.softmax(-1)",
        "recognised, not fused: model.py:60 in cross: return p @ v: sdpa: no soft-cap; flex: inference only on CPU",
    ]


def test_trace_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, Any, str]] = []

    def trace(name: str, metadata_fn: Callable[[], Any], payload_fn: Callable[[], str]) -> None:
        written.append((name, metadata_fn(), payload_fn()))

    monkeypatch.setattr(torch._logging, "trace_structured", trace)
    report.record((FUSED,))
    ((name, metadata, payload),) = written
    assert (name, metadata) == ("artifact", {"name": "sdpa_rewrite", "encoding": "json"})
    assert json.loads(payload)["sites"][0]["emitter"] == "flex"


def test_collecting_nests_and_ends() -> None:
    with report.collect() as outer:
        report.record((FUSED,))
        with report.collect() as inner:
            report.record((MISSED,))
            report.record_failure(ValueError("oh"))
    report.record((RECOGNISED,))
    assert (outer.sites, outer.failures, outer.graphs) == ([FUSED, MISSED], ["ValueError: oh"], 3)
    assert (inner.sites, inner.failures, inner.graphs) == ([MISSED], ["ValueError: oh"], 2)


# -- explain -------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """The graphs that reach the pipeline, which says that each has one fused site."""
    graphs: list[torch.fx.Graph] = []

    def rewrite(graph: torch.fx.Graph) -> tuple[Outcome, ...]:
        graphs.append(graph)
        return (FUSED,)

    monkeypatch.setattr(pipeline, "rewrite_graph", rewrite)
    return graphs


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 12)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, p: float = 0.0) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"out": torch.nn.functional.dropout(attention(*self.proj(x).chunk(3, -1)), p)}


def test_explain_a_function(told: list[torch.fx.Graph]) -> None:
    found = sdpa_rewrite.explain(attention, *inputs())
    assert found == Report((FUSED,), (), 1)
    assert not any("tangents" in node.name for node in told[0].nodes)


def test_explain_a_module_in_training(told: list[torch.fx.Graph]) -> None:
    model, x = Model(), torch.randn(2, 6, 4)
    state = torch.get_rng_state()
    assert sdpa_rewrite.explain(model, x, p=0.5).sites == (FUSED,)
    assert any("tangents" in node.name for node in told[0].nodes)
    # and all is as before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_explain_runs_the_backward(monkeypatch: pytest.MonkeyPatch, told: list[torch.fx.Graph]) -> None:
    ran = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            ran.append(grad.shape)
            return grad

    q, k, v = inputs(requires_grad=True)
    sdpa_rewrite.explain(attention, Watched.apply(q), k, v)
    assert ran == [q.shape]


def test_explain_reports_failures_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.Graph) -> tuple[()]:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(pipeline, "rewrite_graph", fail)
    found = sdpa_rewrite.explain(attention, *inputs())
    assert found == Report((), ("ZeroDivisionError: injected",), 1)


def test_explain_sees_all_graphs_around_a_break(told: list[torch.fx.Graph]) -> None:
    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = attention(q, k, v)
        torch._dynamo.graph_break()
        return attention(first, k, v)

    tensors = inputs()
    for _ in range(12):  # more often than Dynamo recompiles a function
        assert sdpa_rewrite.explain(broken, *tensors).graphs == 2


def test_explain_anew_each_time_with_static_shapes(told: list[torch.fx.Graph]) -> None:
    for length in (8, 12, 16):
        assert sdpa_rewrite.explain(attention, *inputs(2, 3, length, 4)).graphs == 1
    assert not any(isinstance(node.meta.get("val"), torch.SymInt) for graph in told for node in graph.nodes)


@pytest.mark.usefixtures("no_codegen")
def test_explain_leaves_compiled_functions_alone(told: list[torch.fx.Graph]) -> None:
    tensors = inputs()
    compiled = torch.compile(attention, backend="sdpa_rewrite")
    compiled(*tensors)
    assert len(told) == 1
    assert sdpa_rewrite.explain(attention, *tensors).graphs == 1
    assert sdpa_rewrite.explain(compiled, *tensors).graphs == 1
    compiled(*tensors)
    assert len(told) == 3


@pytest.mark.usefixtures("no_codegen")
def test_explain_a_compiled_module(told: list[torch.fx.Graph]) -> None:
    model = torch.compile(Model(), backend="eager")
    assert sdpa_rewrite.explain(model, torch.randn(2, 6, 4)).sites == (FUSED,)


def test_explain_does_not_count_on_the_switch(told: list[torch.fx.Graph]) -> None:
    sdpa_rewrite.disable()
    assert sdpa_rewrite.explain(attention, *inputs()).graphs == 1
    assert not sdpa_rewrite.is_enabled()


def test_an_error_of_the_users_function_is_theirs(told: list[torch.fx.Graph]) -> None:
    with pytest.raises(RuntimeError, match="size"):
        sdpa_rewrite.explain(attention, torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 3))


def test_a_miss_names_role_node_and_line_even_where_the_graph_has_none() -> None:
    """The output node has no line of its own: the softmax's stands for it."""

    def returns_probabilities(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = (q @ k.mT).softmax(-1)
        return p @ v, p

    told = same_as_eager(returns_probabilities, *inputs())
    (reason,) = told.sites[0].reasons
    assert (reason.role, reason.node) == ("escape", "output")
    assert "test_report.py" in reason.source
    assert ".softmax(-1)" in reason.source
