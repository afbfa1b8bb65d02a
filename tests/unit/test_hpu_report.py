"""The report of `make test-hpu`: a card that hangs, and tests that were all skipped, are not told as a success."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from hpu_questions import FROM_SUITE, QUESTIONS

REPORT = Path(__file__).parents[1] / "devices" / "hpu_report.py"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return runpy.run_path(str(REPORT), run_name="report")


def test_a_program_that_hangs_is_ended(report: dict[str, Any]) -> None:
    run = report["run"]
    run.__globals__["TIMEOUT_S"] = 0.3
    done = run(["sh", "-c", "echo compiling; exec sleep 60"])
    assert done.returncode == 124 and done.stderr == "compiling\n\nno end within 0.3 s"


def test_what_went_well(report: dict[str, Any]) -> None:
    result, describe = report["Result"], report["describe"]
    passed, late = result("a", "passed", late=0), result("b", "passed", late=2)
    skipped, failed = result("c", "skipped", "no card"), result("d", "failed", "x\ny")
    assert describe("Lazy", [passed, skipped])[1]
    for results in ([passed, late], [passed, failed], [skipped, skipped], []):
        assert not describe("Lazy", results)[1]
    assert describe("Ranks", [skipped])[1]  # the machine has one card
    assert describe("Lazy", [late, failed])[0] == [
        "",
        "Lazy: 1 passed, 1 failed, 0 skipped",
        "compiled after warm-up: 2 in 1 engines",
        "  passed   b (late: 2)",
        "  failed   d",
        "    | x",
        "    | y",
    ]


def test_a_python_without_the_packages(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = report["main"]
    monkeypatch.setitem(main.__globals__, "NEEDED", ["torch", "no_such_package"])
    assert main() == 2
    said = capsys.readouterr().err
    assert "lacks no_such_package. Install this project" in said
    installs = [line for line in said.splitlines() if "pip install" in line]
    assert installs and all("--no-deps" in line for line in installs), "else torch is replaced"


def test_the_open_questions_of_the_documentation_are_those_of_the_report(report: dict[str, Any]) -> None:
    text = (REPORT.parents[2] / "docs" / "gaudi.md").read_text()
    section = text.partition("## Open questions\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^(\d+)\. (.*\?)", section, re.MULTILINE)
    assert [(int(number), question) for number, question in listed] == list(QUESTIONS.items())


def test_the_files_and_the_test_that_are_named_exist(report: dict[str, Any]) -> None:
    root = REPORT.parents[2]
    texts = [(root / file).read_text() for file in (*report["SUITE"], *report["ALONE"])]
    assert f"def {report['SPLIT']}(" in texts[-1]


def test_what_the_stand_in_says_is_no_answer(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result, answer = report["Result"], report["answer_questions"]
    pair, passed = result("two cards add up", "passed"), result("a", "passed", late=0)
    late, failed = result("b", "passed", late=2), result("c", "failed", "x")
    done = report["subprocess"].CompletedProcess([], 0, "a warning\nwhat the card said\n", "")
    monkeypatch.setitem(answer.__globals__, "run", lambda program: done)
    split = result("test_hpu_alone::test_two_cards_give_the_tokens_of_one", "skipped", "there is one card")
    lines = answer(False, pair, [passed, failed], [late], [passed, split])
    answers = {int(a.split(".")[0]): b.strip() for a, b in zip(lines[2::2], lines[3::2], strict=True)}
    assert sorted(answers) == sorted(QUESTIONS)
    assert answers[1] == "0 in lazy mode, 2 without, were compiled after warm-up"
    assert answers[18] == "skipped there is one card"
    assert answers[14] == "in lazy mode 1 passed, 1 failed; without 1 passed, 0 failed"
    assert {answers[number] for number in QUESTIONS if number not in FROM_SUITE} == {"what the card said"}
    emulated = answer(True, pair, [passed], [passed], [])
    assert all(line.strip().startswith("emulated, not an answer: ") for line in emulated[3::2])
    done.returncode, done.stderr = 1, "no card"
    assert "     the probe failed: no card" in answer(False, pair, [passed], [passed], [])
