"""`vitrine explain`: results, numbers and colours of texts in a terminal."""

import io
import re
import sys
from pathlib import Path

import pytest

import vitrine
from models.artifact import Artifact
from service import commands, explain_command
from service.inference.explain.deletion import TextEffects, UnitEffect
from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    entity_finder,
    reranker,
    tagger,
)

TEXTS = "Where did the cat sit?", "The cat sat on the mat.\nRain fell on the town."


@pytest.fixture(autouse=True)
def _ordinary_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_command, "configure", lambda _: None)


def explained(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> str:
    """Return the output of the command for a model."""
    assert commands.main(["explain", *arguments, "--model", str(path)]) == 0
    return capsys.readouterr().out


def numbers(output: str) -> list[tuple[float, str]]:
    return [(float(n), unit) for n, unit in re.findall(r"^  ([+-]\d\.\d{4})  (.*)$", output, re.M)]


def test_numbers_are_the_differences_of_scores(
    capsys: pytest.CaptureFixture[str], small_artifact: Artifact
) -> None:
    output = explained(capsys, small_artifact.path, *TEXTS, "--by", "sentences")
    with vitrine.SyncModel(small_artifact.path) as model:
        whole, *without = model.score(
            [TEXTS[0], TEXTS[0], TEXTS[0]],
            [TEXTS[1], "Rain fell on the town.", "The cat sat on the mat."],
        ).scores.tolist()
        (empty,) = model.score("", TEXTS[1]).scores.tolist()
    assert f"cosine score {whole:.4f} " in output
    expected = [
        (whole - empty, TEXTS[0]),
        (whole - without[0], "The cat sat on the mat."),
        (whole - without[1], "Rain fell on the town."),
    ]
    found = {unit: number for number, unit in numbers(output)}
    assert found == pytest.approx({unit: number for number, unit in expected}, abs=1e-4)


def test_words_with_the_largest_numbers_are_listed(
    capsys: pytest.CaptureFixture[str], small_artifact: Artifact
) -> None:
    text = " ".join(f"word{index}" for index in range(12))
    output = explained(capsys, small_artifact.path, "word1", text)
    assert "each of its words, the 10 largest of 12:" in output
    assert len(numbers(output)) == 1 + 10


def test_listed_units_are_in_the_order_of_their_numbers(
    capsys: pytest.CaptureFixture[str], small_artifact: Artifact
) -> None:
    text = "The Basic plan does not include phone support, but the Team plan does."
    output = explained(capsys, small_artifact.path, text, "Which plan has support?")
    for lists in output.split("each of its words")[1:]:
        sizes = [abs(number) for number, _ in numbers(lists)]
        assert sizes == sorted(sizes, reverse=True)


def test_label_is_explained(
    capsys: pytest.CaptureFixture[str],
    classifier: Artifact,  # noqa: F811
) -> None:
    output = explained(capsys, classifier.path, "cat dog", "--by", "words")
    with vitrine.SyncModel(classifier.path) as model:
        result = model.classify(["cat dog", "dog", "cat"])
    (best,) = result.best_labels(1)[0]
    whole, without_cat, without_dog = result.scores[:, best].tolist()
    assert f"{result.labels[best]} {whole:.4f} " in output
    assert {unit: number for number, unit in numbers(output)} == {
        "cat": pytest.approx(whole - without_cat, abs=1e-4),
        "dog": pytest.approx(whole - without_dog, abs=1e-4),
    }


def test_logits_of_rerankers_are_explained(
    capsys: pytest.CaptureFixture[str],
    reranker: Artifact,  # noqa: F811
) -> None:
    output = explained(capsys, reranker.path, "w4 w5", "w6 w7", "--by", "words")
    with vitrine.SyncModel(reranker.path) as model:
        whole, *without = model.score(
            ["w4 w5", "w5", "w4", "w4 w5", "w4 w5"], ["w6 w7", "w6 w7", "w6 w7", "w7", "w6"]
        ).raw_scores.tolist()
    assert f"cross-encoder logit {whole:.4f} " in output
    expected = {word: whole - logit for word, logit in zip("4567", without, strict=True)}
    found = {word: number for number, word in numbers(output)}
    assert found == pytest.approx({f"w{n}": number for n, number in expected.items()}, abs=1e-4)


def test_only_terminals_get_colours(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    small_artifact: Artifact,
) -> None:
    arguments = (*TEXTS, "--by", "sentences")
    plain = explained(capsys, small_artifact.path, *arguments)
    assert "\x1b" not in plain
    assert f"\n{TEXTS[1]}\n" in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    coloured = explained(capsys, small_artifact.path, *arguments)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    for number, unit in numbers(plain):
        shades = explain_command._RAISES if number > 0 else explain_command._LOWERS
        match = re.search(rf"\x1b\[38;5;16;48;5;(\d+)m{re.escape(unit)}\x1b", coloured)
        assert match is not None
        assert int(match[1]) in shades
    monkeypatch.setenv("NO_COLOR", "1")
    assert explained(capsys, small_artifact.path, *arguments) == plain


def test_effects_as_small_as_rounding_have_no_colour() -> None:
    units = [UnitEffect(0, 2, 4e-6, 0.0, 1), UnitEffect(3, 5, -6e-6, 0.0, 2)]
    effects = TextEffects(0, "w5 w6", (0, 5), 0.5, 0.0, "words", units)
    painted, *_ = explain_command._lines("w5 w6", effects, [], has_colours=True)
    assert painted.startswith("w5 \x1b")


def test_words_that_the_vocabulary_lacks_are_named_once(
    capsys: pytest.CaptureFixture[str], small_artifact: Artifact
) -> None:
    text = "w5 \N{SAUROPOD} \N{SAUROPOD} \N{BAT}"
    output = explained(capsys, small_artifact.path, "w5", text)
    named = "(the vocabulary lacks \N{SAUROPOD}, \N{BAT}: the model cannot tell such parts apart)"
    assert re.findall(r"^\(.*vocabulary.*", output, re.M) == [named]


def test_escape_sequences_of_a_text_are_not_printed(
    capsys: pytest.CaptureFixture[str], small_artifact: Artifact
) -> None:
    assert "\x1b" not in explained(capsys, small_artifact.path, "a cat", "a \x1b[31mcat")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\U0001f469\u200d\U0001f469\ufe0f\u200d\U0001f467", None),  # a family
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u0d28\u0d4d\u200d", None),
        ("Bonjour\xa0: \u30cd\u30b3\u3000\u30a4\u30cc", None),
        ("pass\u200cword \u200d", "pass\\u200cword \\u200d"),  # they join nothing
        ("a\u200d\u200db \u0645\u200c\u200c", "a\\u200d\\u200db \u0645\u200c\\u200c"),
        ("a\u202ecat\u2066 \u200e\x07", "a\\u202ecat\\u2066 \\u200e\\x07"),
        (
            "\U0001f3f4\U000e0067 a\u200b\u2060\ufeffb",
            "\U0001f3f4\\U000e0067 a\\u200b\\u2060\\ufeffb",
        ),
    ],
)
def test_characters_that_hide_or_reorder_text_are_escaped_and_joiners_are_not(
    capsys: pytest.CaptureFixture[str], small_artifact: Artifact, text: str, shown: str | None
) -> None:
    output = explained(capsys, small_artifact.path, "w", text, "--by", "sentences")
    lines = [line for line in output.splitlines() if not line.startswith("(the vocabulary")]
    *_, line, _, listed = lines
    assert line == (shown or text)
    assert listed.split()[1:] == (shown or text).split()
    assert shown is None or text not in output


def test_characters_that_the_terminal_lacks_are_escaped(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    terminal = io.TextIOWrapper(file, encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    model = str(small_artifact.path)
    assert commands.main(["explain", "caf\xe9 \N{CAT FACE}", "cat", "--model", model]) == 0
    terminal.flush()
    assert b"caf\xe9 \\U0001f431" in file.getvalue()


def test_escape_sequences_of_a_label_are_not_printed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    small_artifact: Artifact,
) -> None:
    monkeypatch.setattr(explain_command, "_explain", lambda *_: ("\x1b]0;owned\x07 0.5", [], []))
    assert "\x1b" not in explained(capsys, small_artifact.path, "a", "b")


@pytest.mark.parametrize(
    ("arguments", "variables", "problem"),
    [
        (["a", "b", "c"], {}, "3 texts; give two, or one to label"),
        (["a", "b", "--model", "./no-such-folder"], {}, "no-such-folder does not exist"),
        (["a", "b", "--by", "letters"], {}, "invalid choice: 'letters'"),
        (["a", "b", "--model", ""], {}, "argument --model: the name of the model is empty"),
        (
            ["a", "b"],
            {"VITRINE_ENGINE__THREADS": "many"},
            "engine.threads: Input should be a valid",
        ),
        (["a", "b"], {"VITRINE_ENGIN__THREADS": "1"}, "did you mean VITRINE_ENGINE__THREADS?"),
    ],
)
def test_wrong_arguments_and_settings_are_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    problem: str,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    try:
        status = commands.main(["explain", *arguments])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert problem in capsys.readouterr().err


def test_missing_model_is_asked_for_by_its_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands.main(["explain", "a", "b"]) == 2
    assert "vitrine explain --model MODEL" in capsys.readouterr().err


def test_units_that_were_measured_are_listed_first(
    capsys: pytest.CaptureFixture[str],
    classifier: Artifact,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The tokens suffice to leave out a few of the words.
    monkeypatch.setattr("service.inference.model.explanations._AUTO", (1, 150))
    text = " ".join(f"w{index}" for index in range(4, 24))
    output = explained(capsys, classifier.path, text)
    lines = output[output.index("each of its words") :].splitlines()[1:]
    is_measured = ["not measured" not in line for line in lines]
    assert 0 < sum(is_measured) < len(lines)
    assert is_measured == sorted(is_measured, reverse=True)


@pytest.mark.parametrize("texts", [["a"], ["a", "b"]])
@pytest.mark.parametrize("fixture", ["tagger", "entity_finder"])
def test_model_without_scores_is_refused(
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    fixture: str,
    texts: list[str],
) -> None:
    path = request.getfixturevalue(fixture).path
    assert commands.main(["explain", *texts, "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert "labels parts of texts, which have no explanation; give a model" in error
    assert "call" not in error


def test_one_text_needs_a_model_with_labels(
    capsys: pytest.CaptureFixture[str], small_artifact: Artifact
) -> None:
    assert commands.main(["explain", "a", "--model", str(small_artifact.path)]) == 2
    assert "has no labels; give a second text" in capsys.readouterr().err
