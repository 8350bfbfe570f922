from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sdpa_rewrite import compat, config
from tests.conftest import RunPython


def test_defaults() -> None:
    assert config.enabled is None
    assert config.strict is False
    assert config.verify is True
    assert config.dropout == "exact"
    assert config.keep_torch_patterns is False
    assert config.disabled_forms == ()
    assert config.disabled_patterns == ()
    assert config.emitters == ("fused", "sdpa", "flex")
    assert config.problems() == ()


def test_names_are_the_options_and_nothing_else() -> None:
    expected = (
        "enabled strict verify dropout keep_torch_patterns disabled_forms disabled_patterns upgrade_calls emitters"
        " cost_model costs log"
    )
    assert list(config.names()) == expected.split()


def test_patch_restores() -> None:
    with config.patch(dropout="any", emitters=("flex",)):
        assert (config.dropout, config.emitters) == ("any", ("flex",))
    assert (config.dropout, config.emitters) == ("exact", ("fused", "sdpa", "flex"))


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"sdpa_rewrite\.config\.dropuot does not exist"):
        config.dropuot = "any"
    with pytest.raises(AttributeError, match="does not exist"), config.patch(dropuot="any"):
        pass


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dropout": "some"}, "sdpa_rewrite.config.dropout must be 'exact' or 'any', not 'some'"),
        ({"emitters": "sdpa"}, "sdpa_rewrite.config.emitters must be a tuple of strings, not 'sdpa'"),
        ({"disabled_forms": (1,)}, "sdpa_rewrite.config.disabled_forms must be a tuple of strings, not (1,)"),
    ],
)
def test_problems_are_told_in_words(options: dict[str, Any], problem: str) -> None:
    with config.patch(options):
        assert config.problems() == (problem,)


def test_environment(run_python: RunPython) -> None:
    script = """
        from sdpa_rewrite import config, is_enabled
        print(is_enabled(), config.strict, config.verify, config.dropout, config.keep_torch_patterns,
              config.disabled_forms, config.emitters)
    """
    values = {
        "SDPA_REWRITE": "1",
        "SDPA_REWRITE_STRICT": "true",
        "SDPA_REWRITE_VERIFY": "0",
        "SDPA_REWRITE_DROPOUT": "any",
        "SDPA_REWRITE_KEEP_TORCH_PATTERNS": "yes",
        "SDPA_REWRITE_DISABLED_FORMS": "dropout, training",
        "SDPA_REWRITE_EMITTERS": "flex",
    }
    done = run_python(script, **values)
    assert done.stdout.strip() == "True True False any True ('dropout', 'training') ('flex',)", done.stderr
    with_false = run_python(script, SDPA_REWRITE="0", SDPA_REWRITE_STRICT="false")
    assert with_false.stdout.strip() == "False False True exact False () ('fused', 'sdpa', 'flex')", with_false.stderr


def value_in_another_thread(name: str) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(getattr(config, name)))
    thread.start()
    thread.join()
    return found[0]


def test_values_belong_to_their_thread() -> None:
    with config.patch(dropout="any"):
        assert value_in_another_thread("dropout") == "exact"


class Entry:
    """An option as torch 2.11 keeps it: one value for the process."""

    user_override: object = "unset"


def test_process_wide_options_become_context_local() -> None:
    old, set_before = Entry(), Entry()
    set_before.user_override = "before"
    module = ModuleType("config_of_2_11")
    module._config = {"old": old, "set_before": set_before}  # type: ignore[attr-defined]
    compat.make_context_local(module)
    assert (old.user_override, set_before.user_override) == ("unset", "before")

    old.user_override = "here"
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(old.user_override))
    thread.start()
    thread.join()
    assert (old.user_override, set_before.user_override, seen) == ("here", "before", ["unset"])


def test_context_local_options_stay_as_they_are() -> None:
    entries = dict(config._config)
    before = {name: type(entry) for name, entry in entries.items()}
    compat.make_context_local(SimpleNamespace(_config=entries))  # type: ignore[arg-type]
    assert {name: type(entry) for name, entry in entries.items()} == before


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3", "2.14.0a0+git1234"])
def test_supported_versions_of_torch(version: str) -> None:
    compat.check_torch_version(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.10.2", "2.16.0", "3.0.0", "unknown"])
def test_unsupported_versions_of_torch(version: str) -> None:
    with pytest.raises(ImportError) as raised:
        compat.check_torch_version(version)
    assert str(raised.value) == f"sdpa_rewrite supports torch 2.11 to 2.15; this is torch {version}"
