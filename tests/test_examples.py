"""Every example runs and says what it should."""

from __future__ import annotations

import importlib.util

import pytest

from examples import author_a_pattern, bert, char_model, compile_time, gpt2, quickstart, route_to_my_kernel

NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (the examples extra)"
)


@pytest.mark.codegen
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart.main()
    out = capsys.readouterr().out
    assert "1 fused" in out
    assert "key padding" in out
    assert float(out.split("eager: ")[1]) < 1e-5


@pytest.mark.usefixtures("no_codegen")
def test_char_model_follows_eager(capsys: pytest.CaptureFixture[str]) -> None:
    char_model.main(["--steps", "4", "--tokens", "32", "--width", "32"])
    out = capsys.readouterr().out
    assert "2 fused" in out
    assert float(out.split("loss: ")[1]) < 1e-3


@pytest.mark.codegen
def test_char_model_draws_the_dropout_of_stock(capsys: pytest.CaptureFixture[str]) -> None:
    char_model.main(["--steps", "3", "--tokens", "32", "--width", "32", "--dropout", "0.1"])
    out = capsys.readouterr().out
    assert "2 fused" in out
    assert "stock torch.compile" in out
    assert float(out.split("loss: ")[1]) < 1e-4


@pytest.mark.usefixtures("no_codegen")
def test_author_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    author_a_pattern.main()
    out = capsys.readouterr().out
    assert "fused by pattern gated_attention" in out
    assert float(out.split("eager: ")[1]) < 1e-5


def test_route_to_my_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    route_to_my_kernel.main()
    out = capsys.readouterr().out
    assert "fused by pattern relu_attention" in out
    assert "8 keys are too few for the kernel" in out


@NEEDS_TRANSFORMERS
@pytest.mark.usefixtures("no_codegen")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", [bert, gpt2], ids=["bert", "gpt2"])
def test_transformers_examples(example: object, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--tokens", "32", "--width", "64", "--repeats", "0"])  # type: ignore[attr-defined]
    assert "2 fused" in capsys.readouterr().out


def test_without_transformers_the_example_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    bert.main([])
    assert "pip install" in capsys.readouterr().out


@NEEDS_TRANSFORMERS
@pytest.mark.filterwarnings("ignore")
def test_compile_time(capsys: pytest.CaptureFixture[str]) -> None:
    compile_time.main(["--layers", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 5
