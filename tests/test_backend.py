"""``torch.compile(model, backend="sdpa_rewrite")``: what is passed on, what is refused, what the backward sees."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import compile_fx as inductor

import sdpa_rewrite
from sdpa_rewrite import config, pipeline
from sdpa_rewrite.backend import split_options
from tests.conftest import attention, inputs

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.fixture
def at_pass(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options that hold each time the pass runs."""
    found: list[dict[str, Any]] = []

    def note(graph: torch.fx.Graph) -> tuple[()]:
        ours = {name: getattr(config, name) for name in config.names()}
        found.append({**ours, "max_autotune": inductor_config.max_autotune, "pad": inductor_config.shape_padding})
        return ()

    monkeypatch.setattr(pipeline, "rewrite_graph", note)
    return found


@pytest.fixture
def at_codegen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str]]:
    """Whether it is a backward, and the dropout option, each time code would be generated."""
    found: list[tuple[bool, str]] = []
    stand_in = inductor.compile_fx_inner

    def note(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        found.append((bool(kwargs.get("is_backward")), config.dropout))
        return stand_in(gm, example_inputs, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx_inner", note)
    return found


def run(requires_grad: bool = False, **options: Any) -> torch.Tensor:
    tensors = inputs(requires_grad=requires_grad)
    result: torch.Tensor = torch.compile(attention, backend="sdpa_rewrite", **options)(*tensors)
    torch.testing.assert_close(result, attention(*tensors))
    return result


def test_runs_the_pass_and_nothing_remains_on(at_pass: list[dict[str, Any]]) -> None:
    run(fullgraph=True)
    assert [each["enabled"] for each in at_pass] == [True]
    assert not sdpa_rewrite.is_enabled()
    torch.compile(attention)(*inputs())
    assert len(at_pass) == 1


def test_runs_the_pass_once_when_the_switch_is_on_too(at_pass: list[dict[str, Any]]) -> None:
    with sdpa_rewrite.enabled():
        run()
    assert len(at_pass) == 1


def test_options_of_both(at_pass: list[dict[str, Any]]) -> None:
    run(options={"dropout": "any", "sdpa_rewrite.emitters": ("flex",), "max-autotune": True, "shape_padding": False})
    (here,) = at_pass
    assert (here["dropout"], here["emitters"], here["max_autotune"], here["pad"]) == ("any", ("flex",), True, False)
    assert (config.dropout, config.emitters) == ("exact", ("fused", "sdpa", "flex"))


def test_mode(at_pass: list[dict[str, Any]]) -> None:
    run(mode="max-autotune-no-cudagraphs")
    assert at_pass[0]["max_autotune"] is True
    assert inductor_config.max_autotune is False


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_dynamic(dynamic: bool | None, seen: list[torch.fx.Graph]) -> None:
    compiled = torch.compile(attention, backend="sdpa_rewrite", dynamic=dynamic, fullgraph=True)
    for length in (8, 12, 20):
        tensors = inputs(2, 3, length, 4)
        torch.testing.assert_close(compiled(*tensors), attention(*tensors))
    assert len(seen) == {True: 1, False: 3, None: 2}[dynamic]


def test_enabled_false_is_the_stock_backend(at_pass: list[dict[str, Any]]) -> None:
    run(options={"enabled": False})
    with sdpa_rewrite.enabled():
        torch._dynamo.reset()
        run(options={"sdpa_rewrite.enabled": False})
    assert not at_pass


def test_a_pass_among_the_options_is_chained(seen: list[torch.fx.Graph]) -> None:
    calls: list[torch.fx.Graph] = []
    run(options={"joint_custom_pre_pass": calls.append})
    assert calls == seen
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropuot": "any"}, r"no option 'dropuot'; did you mean 'dropout'"),
        ({"sdpa_rewrite.emiters": ()}, r"no option 'sdpa_rewrite.emiters'; did you mean 'sdpa_rewrite.emitters'"),
        ({"max_autotun": True}, r"no option 'max_autotun'; did you mean 'max_autotune'"),
        (
            {"qqqqqq": 1},
            r"no option 'qqqqqq'\. Options are ours \(cost_model, .*disabled_forms, .*dropout, .*\) and Inductor's",
        ),
        ({"dropout": "some"}, r"sdpa_rewrite\.config\.dropout must be 'exact' or 'any', not 'some'"),
        ({"max_autotune": "yes"}, r"Unexpected type of attr max_autotune, got str should be bool"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run(options=options)


def test_a_bad_mode() -> None:
    with pytest.raises(Exception, match="Unrecognized mode=fastest"):
        run(mode="fastest")


def test_a_name_that_both_have_is_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdpa_rewrite.backend.config", type("Both", (), {"names": lambda: ("max_autotune",)}))
    assert split_options({"max_autotune": 1, "sdpa_rewrite.max_autotune": 2}) == (
        {"max_autotune": 1},
        {"max_autotune": 2},
    )


def test_the_backward_sees_the_options(at_codegen: list[tuple[bool, str]]) -> None:
    """With static shapes it is compiled when it first runs, which may be in another thread."""
    result = run(requires_grad=True, dynamic=False, options={"dropout": "any"})
    assert at_codegen == [(False, "any")]
    thread = threading.Thread(target=lambda: result.sum().backward())
    thread.start()
    thread.join()
    assert at_codegen == [(False, "any"), (True, "any")]


def test_compile_fx_is_looked_up_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools replace it."""
    monkeypatch.setattr(inductor, "compile_fx", lambda gm, example_inputs, **_: lambda *args: ["replaced"])
    assert torch.compile(attention, backend="sdpa_rewrite")(*inputs()) == "replaced"
