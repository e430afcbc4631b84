"""Pictures of explanations in a notebook, against the page of explanations and its numbers."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import vitrine
from models.artifact import Artifact
from models.manifest import MANIFEST
from service.inference.explain.deletion import Deletions, TextEffects, UnitEffect
from service.inference.explain.notebook_html import Chip, Passage, explanation_html
from tests.models.checkpoints import edit_json
from tests.service.inference.model.conftest import THREAD, Models

PAGE = Path(__file__).parents[4] / "service/page/static"
# The page's own colours and numbers, of its light style.
PAGE_SCRIPT = """
const css = process.argv[1], cases = JSON.parse(process.argv[2]);
globalThis.document = {documentElement: null};
globalThis.getComputedStyle = () => ({
  getPropertyValue: (name) => css.match(new RegExp(`${name}: (#\\\\w+)`))[1],
});
const {diverging} = await import(process.argv[3] + "/colours.js");
const {notation} = await import(process.argv[3] + "/dom.js");
console.log(JSON.stringify(cases.map((values) => {
  const scale = Math.max(...values.map(Math.abs)), {unit, show} = notation(scale);
  return {unit, chips: values.map((value) => ({...diverging(value, scale), shown: show(value)}))};
})));
"""
MARKUP = '<b onclick="go()">cat</b> & \'dog\' <script>alert("1")</script>'
DOCUMENTS = ["A cat sat. It rained at noon.", f"w5 {MARKUP} w6.", "w7"]


class Shown(NamedTuple):
    """A unit in a picture, as a reader sees it."""

    text: str
    number: str
    background: str
    colour: str
    title: str


class Picture(HTMLParser):
    """Reads a picture: its tags, the units, and the texts between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags = set[str]()
        self.attributes = set[str]()
        self.texts = list[str]()
        self.units = list[Shown]()
        self._open: list[dict[str, str]] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag != "br":
            self._open.append({name: value or "" for name, value in attrs})

    def handle_endtag(self, tag: str) -> None:
        assert tag != "br"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        around = [attributes for attributes in self._open if "title" in attributes]
        if not around:
            return
        style = dict(part.split(":", 1) for part in around[0]["style"].split(";"))
        if "title" in self._open[-1]:
            unit = Shown(data, "", style["background"], style["color"], around[0]["title"])
            self.units.append(unit)
        else:
            self.units[-1] = self.units[-1]._replace(number=data)


@pytest.fixture(scope="module")
def model(small_artifact: Artifact) -> Iterator[vitrine.SyncModel]:
    with vitrine.SyncModel(small_artifact.path, THREAD) as model:
        yield model


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_colours_and_numbers_are_those_of_the_page() -> None:
    rng = np.random.default_rng(1)
    scales = [1.0, 0.3, 17.0, 2e-3, 4e-5, 6e-8, 1e-11]
    cases = [[*(rng.uniform(-scale, scale, 20)), scale] for scale in scales]
    script = ["node", "--input-type=module", "-e", PAGE_SCRIPT]
    arguments = [(PAGE / "page.css").read_text(), json.dumps(cases), str(PAGE)]
    ran = subprocess.run([*script, *arguments], capture_output=True, text=True, check=True)
    for values, expected in zip(cases, json.loads(ran.stdout), strict=True):
        text = "x " * len(values)
        chips = [Chip(2 * i, 2 * i + 1, value, "") for i, value in enumerate(values)]
        picture = Picture(explanation_html("", [Passage("", text, chips)], ""))
        for unit, own in zip(picture.units, expected["chips"], strict=True):
            assert unit.number == own["shown"]
            channels = [re.findall(r"\d+", each) for each in (unit.background, own["background"])]
            assert channels[0] == channels[1]
            assert {"#000": "#000000", "#fff": "#ffffff"}[unit.colour] == own["color"]
        largest = expected["chips"][-1]["shown"]
        ends = "".join(picture.texts[: picture.texts.index("x")])
        assert re.search(rf"\N{{MINUS SIGN}}{largest} +\+{largest} {expected['unit']}", ends)


def test_text_between_units_is_shown_as_it_is() -> None:
    chips = [Chip(8, 9, None, "last"), Chip(2, 3, 0.5, "first")]
    picture = Picture(explanation_html("", [Passage("title", "- a <&> b, <c>", chips)], ""))
    shown = picture.texts[picture.texts.index("title") + 1 :]
    assert shown == ["- ", "a", "0.500", " <&> ", "b", "\N{EN DASH}", ", <c>"]


def test_units_have_the_numbers_of_the_explanation(model: vitrine.SyncModel) -> None:
    deletion = vitrine.Deletion(by="words")
    explanation = model.score("w5", "A cat sat. It rained.", explain=deletion).deletions[0]
    (effects,) = explanation.texts
    picture = Picture(explanation._repr_html_())
    expected = ["A", "cat", "sat", ".", "It", "rained", "."]
    assert [unit.text for unit in picture.units] == expected
    for unit, effect in zip(picture.units, effects.units, strict=True):
        assert f"rank {effect.rank}" in unit.title
        assert effect.left_out is not None
        shown = float(unit.number.replace("\N{MINUS SIGN}", "-"))
        scale = max(abs(each.left_out or 0) for each in effects.units)
        factor = 1 if scale >= 0.01 else 1e3
        assert shown == pytest.approx(effect.left_out * factor, abs=5e-3 * scale * factor)


def test_texts_are_text_and_never_markup(model: vitrine.SyncModel) -> None:
    for explain in (True, vitrine.Highlights(1), vitrine.Deletion(method="shapley")):
        picture = Picture(model.rerank("w5 <i>", DOCUMENTS, explain=explain)._repr_html_() or "")
        assert picture.tags <= {"div", "span", "b", "br"}
        assert picture.attributes <= {"style", "title", "dir"}
        shown = "".join(
            text for text in picture.texts if text not in {u.number for u in picture.units}
        )
        assert "".join(MARKUP.split()) in "".join(shown.split())


def test_words_run_in_the_direction_of_their_text_and_numbers_from_left_to_right() -> None:
    chips = [Chip(0, 2, -1.0, ""), Chip(3, 5, 2.0, "")]
    html = explanation_html("Score", [Passage("text", "קט cd", chips)], "effect")
    assert re.findall(r'<(\w+) dir="(\w+)"', html) == [
        ("div", "auto"),
        ("span", "ltr"),
        ("span", "ltr"),
    ]


def test_html_loads_nothing(model: vitrine.SyncModel) -> None:
    html = model.rerank("w5", DOCUMENTS[:1], explain=True)._repr_html_() or ""
    assert not re.search(r"url\(|https?:|src=|href=|class=|id=", html)


def test_ranking_shows_explained_documents_best_first_on_one_scale(
    model: vitrine.SyncModel,
) -> None:
    documents = ["w5 w6", "w7 w8 w9", "w5", "w40"]
    result = model.rerank("w5", documents, explain=vitrine.Deletion(by="words", top_n=2))
    picture = Picture(result._repr_html_() or "")
    best = result.ranking(2)
    assert [unit.text for unit in picture.units] == [
        word for index in best for word in documents[index].split()
    ]
    titles = [text for text in picture.texts if re.match(r"\d\. \[", text)]
    assert [title.split(":")[0] for title in titles] == [
        f"{place}. [{index}] {result.scores[index]:.4g}" for place, index in enumerate(best, 1)
    ]
    ends = {"rgb(201,100,10)", "rgb(31,95,168)"}  # #c9640a and #1f5fa8
    assert sum(unit.background in ends for unit in picture.units) == 1


def test_highlights_shade_the_best_sentences_inside_the_whole_text(
    model: vitrine.SyncModel,
) -> None:
    text = "w5 w6. w7 w8. w9 w40."
    explanation = model.score("w7", text, explain=vitrine.Highlights(1)).deletions[0]
    picture = Picture(explanation._repr_html_())
    (unit,) = picture.units
    (best,) = explanation.texts[0].units
    assert unit.text == text[best.start : best.end]
    assert all(sentence in "".join(picture.texts) for sentence in ("w5 w6.", "w7 w8.", "w9 w40."))


def test_text_without_units_is_shown(model: vitrine.SyncModel) -> None:
    explanation = model.score("w5", " ", explain=True).deletions[0]
    assert not explanation.texts[0].units
    assert not Picture(explanation._repr_html_()).units
    assert repr(explanation).endswith("; 0 words)")


def test_result_without_explanation_has_no_picture(model: vitrine.SyncModel) -> None:
    assert model.rerank("w5", DOCUMENTS)._repr_html_() is None


def test_truncated_text_says_what_the_model_reads(model: vitrine.SyncModel) -> None:
    text = "w5 w6. " * 300
    explanation = model.score("w5", text, explain=vitrine.Deletion(by="sentences")).deletions[0]
    read = explanation.texts[0].read
    expected = f"the model reads characters 0 to {read[1]} of {len(text)}"
    assert expected in explanation._repr_html_()


def test_words_that_the_vocabulary_lacks_are_named(model: vitrine.SyncModel) -> None:
    lacked = [chr(ord("\N{SAUROPOD}") + index) for index in range(7)]
    explanation = model.score("w5", " ".join([*lacked, "w6"]), explain=True).deletions[0]
    title = f"; the vocabulary lacks {', '.join(lacked[:5])} and 2 more: the model"
    assert title in explanation._repr_html_()


def test_effects_as_small_as_rounding_are_hardly_coloured() -> None:
    units = [UnitEffect(0, 2, 1e-8, 0.0, 1), UnitEffect(3, 5, 0.0, 0.0, 2)]
    text = TextEffects(1, "w5 w6", (0, 5), 0.5, 0.0, "words", units)
    picture = Picture(Deletions([text], [text], unknown=[[], []])._repr_html_())
    one, other = (unit.background for unit in picture.units)
    assert one == other


@pytest.mark.slow
def test_label_and_pair_of_texts_are_named(labeler: vitrine.SyncModel) -> None:
    result = labeler.classify(["w5 w6", ("w7", "w8 w9")], explain=vitrine.Deletion(by="words"))
    assert labeler.classify(["w5 w6"])._repr_html_() is None
    picture = Picture(result._repr_html_() or "")
    assert [unit.text for unit in picture.units] == ["w5", "w6", "w7", "w8", "w9"]
    titles = " ".join(picture.texts)
    labels = [result.deletions[index].label for index in (0, 1)]
    assert f"[0] {labels[0]}" in titles
    for name in ("text, words", "first text, words", "second text, words"):
        assert name in titles
    assert f"score of {labels[0]}" in repr(result.deletions[0])


@pytest.mark.slow
def test_numbers_stay_beside_labels_that_run_from_right_to_left(
    classifier: Artifact,
    tmp_path: Path,
) -> None:
    shutil.copytree(classifier.path, tmp_path / "artifact")
    hebrew = "\u05d7\u05ea\u05d5\u05dc"
    edit_json(tmp_path / "artifact" / MANIFEST, labels=[hebrew, f"{hebrew} 2", f"{hebrew} 3"])
    with vitrine.SyncModel(tmp_path / "artifact", THREAD) as model:
        result = model.classify(["w5 w6"], explain=vitrine.Deletion(by="words"))
    isolated = re.compile(f"\u2068{hebrew}[ 23]*\u2069 [0-9]")
    for shown in (
        repr(result),
        repr(result.deletions[0]),
        *Picture(result._repr_html_() or "").texts,
    ):
        assert shown.count(hebrew) == len(isolated.findall(shown))
    assert isolated.search(repr(result))


@pytest.mark.slow
def test_reranker_is_shown_by_its_logits(models: Models) -> None:
    result = models["reranker"].rerank("w5", ["w6 w7"], explain=vitrine.Deletion(by="words"))
    explanation = result.deletions[0]
    assert repr(explanation).startswith("Deletions(logit ")
    titles = [unit.title for unit in Picture(explanation._repr_html_()).units]
    for title, effect in zip(titles, explanation.raw_texts[0].units, strict=True):
        assert effect.left_out is not None
        assert f"{effect.left_out:+.4g}".replace("-", "\N{MINUS SIGN}") in title
