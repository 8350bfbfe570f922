"""The command that runs the kernels under sanitizers: it tells findings from silence."""

from __future__ import annotations

import sys

import pytest

from tests import sanitize

PLANTED = "planted\n==1==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x10\n    #0 0x1 in kernel a.cpp:5\n"
CASE = "case native float32 plain (1, 2, 3, 4, 5, 6)\n"


def test_clean() -> None:
    clean, text = sanitize.judged(0, PLANTED + CASE)
    assert clean
    assert text == "1 cases, 0 findings (the planted one was found)"


def test_a_finding_is_told_with_its_case_and_stack_once() -> None:
    error = "a.cpp:7:3: runtime error: signed integer overflow: 1\n    #0 0x2 in step a.cpp:7\nmore\n"
    clean, text = sanitize.judged(0, PLANTED + CASE + error + error)
    assert not clean
    assert "native float32 plain (1, 2, 3, 4, 5, 6): runtime error: signed integer overflow" in text
    assert "    #0 0x2 in step a.cpp:7" in text
    assert text.endswith("1 cases, 1 findings (the planted one was found)")


def test_silence_on_the_planted_error_is_a_failure() -> None:
    clean, text = sanitize.judged(0, "planted\n" + CASE)
    assert not clean
    assert "the sanitizers are not at work" in text


def test_a_run_that_breaks_off_is_a_failure() -> None:
    clean, text = sanitize.judged(1, PLANTED + CASE)
    assert not clean
    assert "ended with status 1" in text


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit):
        sanitize.main(["--forms", "circular"])


@pytest.mark.codegen
@pytest.mark.skipif(sys.platform != "linux", reason="GCC's sanitizers on Linux")
def test_one_form_runs_clean(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--forms", "dropout and mask", "--dtypes", "float32", "--isa", "portable"]
    assert sanitize.main(arguments) == 0, capsys.readouterr().out
