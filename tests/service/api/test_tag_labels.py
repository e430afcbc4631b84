"""`POST /tag` with labels of the request, against the formulas of the package gliner."""

import asyncio
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from service.inference import call_options
from service.inference.results import spans as span_results
from tests.models.gliner import Gliner, entities, save_gliner
from tests.service.api.posting import ask, refused, wrong_model
from tests.serving import ready_model

pytestmark = pytest.mark.slow

LABELS = ["Cat the", "sat b", "A w5"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCW5679é.-_"
Json = dict[str, Any]


def make_texts(count: int) -> list[str]:
    generator = random.Random(0)  # noqa: S311
    lengths = [generator.randint(1, 24) for _ in range(count)]
    return [
        " ".join(
            "".join(generator.choices(LETTERS, k=generator.randint(1, 6))) for _ in range(length)
        )
        for length in lengths
    ]


# Texts of one word and of more than 40, with words without tokens, and without words.
TEXTS = ["a", "the cat " * 25, "the \u200d cat 🎉 sat", "", " \n", "<<ENT>> the [SEP]", "a" * 300]
TEXTS += make_texts(200 - len(TEXTS))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Gliner:
    return save_gliner(tmp_path_factory.mktemp("reference"), "distilbert").double()


Scores = list[tuple[torch.Tensor, list[tuple[int, int]]]]


@pytest.fixture(scope="module")
def scores(reference: Gliner) -> Scores:
    """Return the logits of each text, and the spans of its words."""
    nothing = torch.zeros(0, 5, len(LABELS)), list[tuple[int, int]]()
    return [reference.logits(text, LABELS) if text.strip() else nothing for text in TEXTS]


def ask_all(client: TestClient, texts: Sequence[str], **options: object) -> list[list[Json]]:
    found: list[list[Json]] = []
    for start in range(0, len(texts), 8):
        found += ask(client, "/tag", inputs=texts[start : start + 8], **options)["entities"]
    return found


def _place(entity: Json) -> tuple[int, int, str]:
    return entity["start"], entity["end"], entity["label"]


@pytest.mark.parametrize("threshold", [0.5, 0.2])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("multi_label", [False, True])
def test_entities_of_200_texts_equal_the_package(
    threshold: float, nested: bool, multi_label: bool, entity_client: TestClient, scores: Scores
) -> None:
    options = {"threshold": threshold, "nested": nested, "multi_label": multi_label}
    actual = ask_all(entity_client, TEXTS, labels=LABELS, **options)
    count = 0
    for text, found, (own, spans) in zip(TEXTS, actual, scores, strict=True):
        modes = {"nested": nested, "multi_label": multi_label}
        expected = entities(own, spans, LABELS, threshold, **modes)
        # In the order of their starts, and then of their scores, which can be equal in float32.
        order = [(entity["start"], -round(entity["score"], 4)) for entity in found]
        assert order == sorted(order)
        assert sorted(found, key=_place) == [
            {
                "label": label,
                "score": pytest.approx(score, abs=1e-5),
                "start": start,
                "end": end,
                "text": text[start:end],
            }
            for start, end, label, score in sorted(expected)
        ]
        count += len(expected)
    assert count > 300
    found_labels = {entity["label"] for found in actual for entity in found}
    assert found_labels == {*LABELS} if multi_label else len(found_labels) > 1


def test_defaults_are_the_package_defaults_and_duplicate_labels_are_ignored(
    entity_client: TestClient,
) -> None:
    body: Json = {"inputs": TEXTS[7:12], "threshold": 0.5, "nested": False, "multi_label": False}
    expected = ask(entity_client, "/tag", labels=LABELS, **body)
    assert ask(entity_client, "/tag", labels=LABELS, inputs=TEXTS[7:12]) == expected
    assert ask(entity_client, "/tag", labels=[*LABELS, *LABELS], inputs=TEXTS[7:12]) == expected


def test_requests_with_different_labels_share_batches(
    entity_finder: Artifact, reference: Gliner
) -> None:
    async def tag_all() -> list[Any]:
        async with await vitrine.open_model(entity_finder.path) as model:
            calls = (
                model.tag(TEXTS[7 + i : 12 + i], labels=LABELS[: 1 + i % 3], threshold=0.3)
                for i in range(9)
            )
            return list(await asyncio.gather(*calls))

    for i, result in enumerate(asyncio.run(tag_all())):
        labels = LABELS[: 1 + i % 3]
        for text, found in zip(TEXTS[7 + i : 12 + i], result, strict=True):
            own, spans = reference.logits(text, labels)
            expected = entities(own, spans, labels, 0.3, nested=False, multi_label=False)
            actual = [(entity.start, entity.end, entity.label) for entity in found]
            assert actual == [entity[:3] for entity in expected]


def test_python_and_http_give_the_same_entities(
    entity_finder: Artifact, entity_client: TestClient
) -> None:
    with vitrine.SyncModel(entity_finder.path, vitrine.ModelOptions(threads=1)) as model:
        result = model.tag(TEXTS[7:12], labels=tuple(LABELS), nested=True)
        with pytest.raises(vitrine.InvalidInput, match="start of a text with labels") as raised:
            model.tag("the", labels=LABELS, on_overflow="truncate_left")
        assert raised.value.pointer == "/on_overflow"
    expected = ask(entity_client, "/tag", inputs=TEXTS[7:12], labels=LABELS, nested=True)
    for found, own in zip(result.entities, expected["entities"], strict=True):
        assert [(e.label, e.start, e.end, e.text) for e in found] == [
            (e["label"], e["start"], e["end"], e["text"]) for e in own
        ]


def test_text_cannot_add_a_label(entity_client: TestClient) -> None:
    body: Json = {"labels": ["the"], "threshold": 0}
    result = ask(entity_client, "/tag", inputs=["a <<ENT>> b", "a"], **body)
    assert [entity["text"] for entity in result["entities"][1]] == ["a"]
    assert {entity["label"] for found in result["entities"] for entity in found} == {"the"}


def test_truncated_texts_are_marked_or_refused(entity_client: TestClient) -> None:
    body: Json = {"inputs": ["the", TEXTS[1]], "labels": LABELS}
    result = ask(entity_client, "/tag", threshold=0, **body)
    assert result["truncated"] == [False, True]
    assert max(entity["end"] for entity in result["entities"][1]) == len("the cat " * 20) - 1
    problem = refused(entity_client, "/tag", **body, on_overflow="error")
    assert (problem["status"], problem["code"], problem["index"]) == (422, "too_long", 1)


@pytest.mark.parametrize(
    ("changes", "index", "pointer", "message"),
    [
        ({"labels": None}, None, "/labels", "has no labels of its own; set labels"),
        ({"labels": []}, None, "/labels", "at least 1 item"),
        ({"labels": ["a"] * 101}, None, "/labels", "at most 100"),
        ({"labels": "a"}, None, "/labels", "valid list"),
        ({"labels": ["the", ""]}, None, "/labels/1", "at least 1 character"),
        ({"labels": ["the", " \n"]}, None, "/labels/1", "the label is empty"),
        ({"labels": ["the", "a" * 257]}, None, "/labels/1", "at most 256 characters"),
        ({"labels": ["the", 3]}, None, "/labels/1", "valid string"),
        ({"labels": ["the", "\u200d"]}, None, "/labels/1", "the label has no tokens"),
        ({"labels": ["the", "a <<ENT>> b"]}, None, "/labels/1", "contains the marker of labels"),
        ({"labels": ["the", "the", "<<ENT>>"]}, None, "/labels/2", "the marker of labels"),
        ({"labels": ["a " * 120, "b " * 120]}, None, "/labels", "2 labels leave no room"),
        ({"threshold": 1.5}, None, "/threshold", "less than or equal to 1"),
        ({"threshold": "0.5"}, None, "/threshold", "valid number"),
        ({"nested": 1}, None, "/nested", "valid boolean"),
        ({"multi_label": "no"}, None, "/multi_label", "valid boolean"),
        ({"aggregation": "max"}, None, "/aggregation", "aggregation does not apply to labels"),
        ({"inputs": ["the", "a" * 100_001]}, 1, "/inputs/1", "the limit is 100000"),
    ],
)
def test_invalid_requests_name_the_item(
    changes: Json, index: int | None, pointer: str, message: str, entity_client: TestClient
) -> None:
    problem = refused(entity_client, "/tag", **{"inputs": "the cat", "labels": LABELS, **changes})
    assert problem["status"] == (413 if "the limit is" in message else 422)
    assert (problem.get("index"), problem.get("pointer")) == (index, pointer)
    assert message in problem["detail"]


@pytest.mark.parametrize("option", [{"threshold": 0.4}, {"nested": True}, {"multi_label": True}])
def test_options_of_labels_need_labels(option: Json, tag_client: TestClient) -> None:
    problem = refused(tag_client, "/tag", inputs="w5", **option)
    (name,) = option
    assert (problem["status"], problem["pointer"]) == (422, f"/{name}")


def test_models_with_other_labels_refuse_labels(
    tag_client: TestClient, client: TestClient, entity_client: TestClient
) -> None:
    cannot = "cannot find entities with labels of the request; it can "
    for other, use in ((tag_client, "tag the tokens of texts"), (client, "encode texts")):
        assert cannot + use in wrong_model(other, "/tag", inputs="w5", labels=["a"])
    can = "; it can find entities with labels of the request"
    assert "cannot encode texts" + can in wrong_model(entity_client, "/encode", inputs="the")
    assert can in wrong_model(entity_client, "/rerank", query="the", documents=["a"])
    target = {"text": "the", "target": {"type": "norm"}}
    assert "is of another kind" in wrong_model(entity_client, "/debug/attribute", **target)


def test_number_of_tokens_is_limited(
    entity_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ready_model(entity_client).__dict__, "max_token_vectors", 30)
    problem = refused(entity_client, "/tag", inputs=["the"] * 4, labels=LABELS)
    assert (problem["status"], problem["code"]) == (422, "too_many_tokens")


def test_number_of_entities_is_limited(
    entity_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"labels": LABELS, "threshold": 0, "nested": True, "multi_label": True}
    body = {"inputs": ["the cat sat " * 4] * 3, **options}
    result = ask(entity_client, "/tag", **body)
    count = sum(map(len, result["entities"]))
    assert count > sum(result["tokens"]) + 1  # the limit on tokens is the same
    limits = ready_model(entity_client).__dict__
    monkeypatch.setitem(limits, "max_token_vectors", count)
    assert ask(entity_client, "/tag", **body) == result
    monkeypatch.setitem(limits, "max_token_vectors", count - 1)
    problem = refused(entity_client, "/tag", **body)
    assert (problem["status"], problem["code"]) == (422, "too_many_entities")
    assert f"more than {count - 1} entities" in problem["detail"]


def test_deadline_ends_the_search_between_texts(
    entity_finder: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    decoded: list[str] = []

    def decode(text: str, *args: Any) -> list[vitrine.Entity]:  # noqa: ANN401
        nonlocal now
        now += 1000
        decoded.append(text)
        return span_decode(text, *args)

    span_decode = span_results.decode
    monkeypatch.setattr(span_results, "decode", decode)
    monkeypatch.setattr(call_options, "time", SimpleNamespace(monotonic=lambda: now))
    with (
        vitrine.SyncModel(entity_finder.path, vitrine.ModelOptions(threads=1)) as model,
        pytest.raises(vitrine.DeadlineExceeded, match="deadline of 999 s exceeded"),
    ):
        model.tag(["the cat", "a dog"], labels=LABELS, timeout_s=999)
    assert decoded == ["the cat"]


def test_info_lists_the_output(entity_client: TestClient) -> None:
    info = entity_client.get("/info").json()
    assert (info["outputs"], info["labels"], info["self_check"].keys()) == (
        ["spans"],
        [],
        {"spans"},
    )
    assert entity_client.get("/tei/info").json()["model_type"] == {}
