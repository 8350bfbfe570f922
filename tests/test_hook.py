"""The switch and the pass: on where it should be, beside what others set, and harmless when it fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import unittest.mock
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import sdpa_rewrite
from sdpa_rewrite import config, graph_pass, hook, pipeline
from sdpa_rewrite.graph_pass import AttentionPass, PassChain
from tests.conftest import attention, inputs

pytestmark = pytest.mark.usefixtures("no_codegen")


def compile_once() -> None:
    """Compile and run with the stock backend."""
    torch._dynamo.reset()
    torch.compile(attention)(*inputs())


class Keyed(CustomGraphPass):
    """Somebody else's pass, well behaved."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "keyed"


# -- the switch ----------------------------------------------------------------------------------------------


def test_off_by_default(seen: list[torch.fx.Graph]) -> None:
    assert not sdpa_rewrite.is_enabled()
    compile_once()
    assert not seen


def test_enable_and_disable(seen: list[torch.fx.Graph]) -> None:
    sdpa_rewrite.enable()
    sdpa_rewrite.enable()
    compile_once()
    assert len(seen) == 1
    sdpa_rewrite.disable()
    compile_once()
    assert len(seen) == 1


def test_training_hands_over_the_joint_graph(seen: list[torch.fx.Graph]) -> None:
    with sdpa_rewrite.enabled():
        torch.compile(attention)(*inputs(requires_grad=True)).sum().backward()
    assert len(seen) == 1
    assert any("tangents" in node.name for node in seen[0].nodes)


def test_scope(seen: list[torch.fx.Graph]) -> None:
    with sdpa_rewrite.enabled():
        compile_once()
    compile_once()
    assert len(seen) == 1


def test_scope_ends_with_an_exception() -> None:
    with contextlib.suppress(KeyError), sdpa_rewrite.enabled():
        raise KeyError
    assert not sdpa_rewrite.is_enabled()


def test_scopes_nest() -> None:
    with sdpa_rewrite.enabled():
        with sdpa_rewrite.enabled(dropout="any"):
            assert (sdpa_rewrite.is_enabled(), config.dropout) == (True, "any")
        assert (sdpa_rewrite.is_enabled(), config.dropout) == (True, "exact")
    assert not sdpa_rewrite.is_enabled()


def test_one_scope_object_serves_again_and_nested(seen: list[torch.fx.Graph]) -> None:
    scope = sdpa_rewrite.enabled()
    for _ in range(2):
        with scope, scope:
            compile_once()
        assert not sdpa_rewrite.is_enabled()
    assert len(seen) == 2


def test_leaving_a_scope_that_was_not_entered_here() -> None:
    with pytest.raises(RuntimeError, match=r"leaves an enabled\(\) scope that it did not enter"):
        sdpa_rewrite.enabled().__exit__(None, None, None)


def test_scope_as_a_decorator() -> None:
    assert sdpa_rewrite.enabled()(sdpa_rewrite.is_enabled)()
    assert not sdpa_rewrite.is_enabled()


def test_config_is_the_same_switch(seen: list[torch.fx.Graph]) -> None:
    with config.patch(enabled=True):
        compile_once()
        with config.patch(enabled=False):
            compile_once()
    assert len(seen) == 1
    sdpa_rewrite.enable()
    with config.patch(enabled=False):
        compile_once()
        with sdpa_rewrite.enabled():
            compile_once()
    assert len(seen) == 2


def test_the_last_word_counts() -> None:
    config.enabled = True
    sdpa_rewrite.disable()
    assert not sdpa_rewrite.is_enabled()
    config.enabled = False
    sdpa_rewrite.enable()
    assert sdpa_rewrite.is_enabled()


def test_an_unknown_option_of_a_scope_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"sdpa_rewrite\.config\.dropuot does not exist; there are enabled, "):
        sdpa_rewrite.enabled(dropuot="any")


# -- threads -------------------------------------------------------------------------------------------------


class Worker:
    """A thread that does one thing after another, each when told to, so that tests can interleave two of them."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], Any]] = []
        self._wake, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            self._result = self._tasks.pop()()
            self._done.release()

    def do(self, task: Callable[[], Any]) -> Any:
        self._tasks.append(task)
        self._wake.release()
        assert self._done.acquire(timeout=60)
        return self._result


def test_the_process_switch_reaches_every_thread(seen: list[torch.fx.Graph]) -> None:
    before, after = Worker(), None
    assert not before.do(sdpa_rewrite.is_enabled)
    sdpa_rewrite.enable()
    after = Worker()
    assert before.do(sdpa_rewrite.is_enabled)
    assert after.do(sdpa_rewrite.is_enabled)
    after.do(compile_once)
    assert len(seen) == 1


def test_a_scope_is_its_threads_own(seen: list[torch.fx.Graph]) -> None:
    other = Worker()
    with sdpa_rewrite.enabled():
        assert not other.do(sdpa_rewrite.is_enabled)
        other.do(compile_once)
        assert not seen


def test_overlapping_scopes_of_two_threads() -> None:
    """One exits while the other is inside: neither loses its own nor keeps the other's."""
    a, b, scope = Worker(), Worker(), sdpa_rewrite.enabled()
    a.do(scope.__enter__)
    b.do(scope.__enter__)
    a.do(lambda: scope.__exit__(None, None, None))
    assert (a.do(sdpa_rewrite.is_enabled), b.do(sdpa_rewrite.is_enabled)) == (False, True)
    b.do(lambda: scope.__exit__(None, None, None))
    assert (a.do(sdpa_rewrite.is_enabled), b.do(sdpa_rewrite.is_enabled)) == (False, False)
    assert not sdpa_rewrite.is_enabled()


def test_enable_during_another_threads_scope_is_not_lost() -> None:
    a, b, scope = Worker(), Worker(), sdpa_rewrite.enabled()
    a.do(scope.__enter__)
    b.do(sdpa_rewrite.enable)
    a.do(lambda: scope.__exit__(None, None, None))
    assert a.do(sdpa_rewrite.is_enabled)
    a.do(scope.__enter__)
    b.do(sdpa_rewrite.disable)
    assert a.do(sdpa_rewrite.is_enabled)
    a.do(lambda: scope.__exit__(None, None, None))
    assert not a.do(sdpa_rewrite.is_enabled)


# -- beside others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: p.__call__, lambda p: [p], lambda p: (p,)])
def test_a_pass_that_was_there_runs_first(wrap: Callable[[Keyed], Any], seen: list[torch.fx.Graph]) -> None:
    theirs = Keyed()
    option = wrap(theirs)
    with inductor_config.patch(joint_custom_pre_pass=option):
        with sdpa_rewrite.enabled():
            assert len(graph_pass.passes_of(inductor_config.joint_custom_pre_pass)) == 2
            compile_once()
        assert inductor_config.joint_custom_pre_pass is option
    assert (theirs.calls, len(seen)) == (1, 1)


def test_order_of_the_chain() -> None:
    order = []
    chain = PassChain((lambda _: order.append("theirs"), lambda _: order.append("ours")))
    chain(torch.fx.Graph())
    assert order == ["theirs", "ours"]


def test_a_pass_that_is_set_while_ours_is_on(seen: list[torch.fx.Graph]) -> None:
    theirs = Keyed()
    sdpa_rewrite.enable()
    with inductor_config.patch(joint_custom_pre_pass=theirs):
        compile_once()
        sdpa_rewrite.disable()
        assert inductor_config.joint_custom_pre_pass is theirs
    assert inductor_config.joint_custom_pre_pass is None
    assert (theirs.calls, len(seen)) == (1, 1)


def test_a_mocked_option(seen: list[torch.fx.Graph]) -> None:
    theirs = Keyed()
    with sdpa_rewrite.enabled():
        with unittest.mock.patch.object(inductor_config, "joint_custom_pre_pass", theirs):
            compile_once()
        assert (theirs.calls, len(seen)) == (1, 1)
        compile_once()
        assert (theirs.calls, len(seen)) == (1, 2)
    compile_once()
    assert (theirs.calls, len(seen)) == (1, 2)


def test_a_chain_that_others_keep_is_not_ours_any_more(seen: list[torch.fx.Graph]) -> None:
    theirs = Keyed()
    with sdpa_rewrite.enabled():
        kept = PassChain((theirs, inductor_config.joint_custom_pre_pass))
        with inductor_config.patch(joint_custom_pre_pass=kept):
            compile_once()
        assert len(seen) == 1  # ours is in it and is not added again
        key_inside = kept.uuid()
    with inductor_config.patch(joint_custom_pre_pass=kept):
        compile_once()
    assert (theirs.calls, len(seen)) == (2, 1)
    assert kept.uuid() != key_inside


def test_the_pass_object_with_the_stock_backend(seen: list[torch.fx.Graph]) -> None:
    options = {"joint_custom_pre_pass": sdpa_rewrite.attention_pass}
    torch.compile(attention, options=options)(*inputs())
    assert len(seen) == 1
    torch._dynamo.reset()
    with sdpa_rewrite.enabled():
        torch.compile(attention, options=options)(*inputs())
    assert len(seen) == 2  # once for each compilation


def test_their_failure_is_theirs() -> None:
    def failing(graph: torch.fx.Graph) -> None:
        raise RuntimeError("not ours")

    with (
        inductor_config.patch(joint_custom_pre_pass=failing),
        sdpa_rewrite.enabled(),
        pytest.raises(Exception, match="not ours"),
    ):
        compile_once()


# -- failures ------------------------------------------------------------------------------------------------


def fail(graph: torch.fx.Graph) -> tuple[()]:
    raise ZeroDivisionError("injected")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_failure_leaves_compilation_and_results_alone(
    requires_grad: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    counted: Callable[[], Counter[str]],
) -> None:
    monkeypatch.setattr(pipeline, "rewrite_graph", fail)
    tensors = inputs(requires_grad=requires_grad)
    with sdpa_rewrite.enabled(), caplog.at_level(logging.WARNING, "sdpa_rewrite"):
        compiled = torch.compile(attention, fullgraph=True)(*tensors)
    torch.testing.assert_close(compiled, attention(*tensors))
    if requires_grad:
        expected = torch.autograd.grad(attention(*tensors).sum(), tensors)
        torch.testing.assert_close(torch.autograd.grad(compiled.sum(), tensors), expected)
    assert (counted()["failed"], counted()["failed: ZeroDivisionError"]) == (1, 1)
    assert "compiled as written, since rewriting its attention failed (ZeroDivisionError: injected)" in caplog.text


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "rewrite_graph", fail)
    with sdpa_rewrite.enabled(strict=True), pytest.raises(Exception, match="ZeroDivisionError: injected"):
        compile_once()


def test_an_engine_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, counted: Callable[[], Counter[str]]
) -> None:
    monkeypatch.delattr(sdpa_rewrite, "pipeline")
    monkeypatch.setitem(sys.modules, "sdpa_rewrite.pipeline", None)
    tensors = inputs()
    with sdpa_rewrite.enabled():
        torch.testing.assert_close(torch.compile(attention)(*tensors), attention(*tensors))
    assert counted()["failed"] == 1


def test_a_bad_value_of_an_option(seen: list[torch.fx.Graph], caplog: pytest.LogCaptureFixture) -> None:
    with sdpa_rewrite.enabled(dropout="some"):
        compile_once()
        assert "sdpa_rewrite.config.dropout must be 'exact' or 'any', not 'some'" in caplog.text
        with config.patch(strict=True), pytest.raises(Exception, match="must be 'exact' or 'any'"):
            compile_once()
    assert not seen


def test_graphs_are_not_kept_alive(seen: list[torch.fx.Graph]) -> None:
    before = set(sdpa_rewrite.compat._ours)  # AOTInductor keeps those that it compiled
    with sdpa_rewrite.enabled():
        compile_once()
    seen.clear()
    torch._dynamo.reset()
    gc.collect()
    assert not set(sdpa_rewrite.compat._ours) - before


# -- the key for Inductor's caches ---------------------------------------------------------------------------


def test_the_key_changes_with_what_changes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    key = AttentionPass().uuid
    plain = key()
    assert plain
    assert key() == plain
    for option in ({"dropout": "any"}, {"emitters": ("flex",)}, {"disabled_forms": ("x",)}, {"verify": False}):
        with config.patch(option):
            assert key() != plain
    for option in ({"log": "debug"}, {"enabled": True}):
        with config.patch(option):
            assert key() == plain
    monkeypatch.setattr(graph_pass, "registered_patterns_key", lambda: ("a user's pattern",))
    assert key() != plain


def test_the_key_covers_sources_patterns_and_templates(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "kernels").mkdir(parents=True)
    (tmp_path / "patterns").mkdir()
    (package / "patterns").symlink_to(tmp_path / "patterns")
    sources = ["a.py", "kernels/b.json", "kernels/c.h", "kernels/d.cpp", "patterns/e.py"]
    for name in [*sources, "notes.txt"]:
        (package / name).write_text(name)
    found = sorted(str(path.relative_to(package)) for path in graph_pass._source_files(package))
    assert found == sources


def test_the_key_of_this_package_covers_its_patterns() -> None:
    names = {path.parent.name for path in graph_pass._source_files(Path(graph_pass.__file__).parent)}
    assert {"sdpa_rewrite", "patterns"} <= names


def test_unreadable_sources_mean_no_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> str:
        raise OSError

    monkeypatch.setattr(graph_pass, "_sources_digest", unreadable)
    assert AttentionPass().uuid() is None


def test_a_chain_has_a_key_only_if_all_have() -> None:
    assert PassChain((Keyed(), Keyed())).uuid() == ("keyed", "keyed")
    assert PassChain((Keyed(), lambda graph: None)).uuid() is None


def test_an_inactive_pass_has_the_key_of_one_that_does_nothing() -> None:
    scoped = AttentionPass(hook.is_enabled)
    off = scoped.uuid()
    with sdpa_rewrite.enabled():
        assert scoped.uuid() == AttentionPass().uuid()
    assert scoped.uuid() == off == "sdpa_rewrite: off"
