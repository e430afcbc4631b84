"""Explanations by deletion, against results of `score` for the texts that a client would send."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import vitrine
from models.artifact import Artifact
from models.manifest import TOKENIZER
from service.inference.call_options import CallOptions, Deadline, OnOverflow, Priority
from service.inference.explain.deletion import without
from service.inference.model import scoring
from service.inference.model.deletion_planner import DeletionPlanner
from service.inference.model.variant_texts import VariantTexts
from service.inference.results.loaded_model import LoadedModel
from service.inference.tokenizing.pair_rows import PairRows
from tests.service.inference.model.conftest import BOUNDS, KINDS, TEXT, WORDS, Models, left, score

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(query=TEXT, document=TEXT, by=st.sampled_from(["words", "sentences", "chunks"]))
def test_each_number_is_the_difference_of_two_scores(
    models: Models,
    kind: str,
    query: str,
    document: str,
    by: Literal["words", "sentences", "chunks"],
) -> None:
    model, bound = models[kind], BOUNDS.get(kind, 5e-6)
    deletion = vitrine.Deletion(by=by, of="both")
    result = model.score(query, document, explain=deletion)
    assert result.scores == pytest.approx([score(model, query, document)], abs=bound)
    (explanation,) = result.deletions.values()
    assert [(text.text, text.by) for text in explanation.texts] == [(0, by), (1, by)]
    # The query of the multi-vector model can be too long: variants are those of what it reads.
    parts = [
        text[slice(*effects.read)]
        for text, effects in zip((query, document), explanation.texts, strict=True)
    ]
    assert result.truncated[0] or parts == [query, document]
    for raw, texts in ((False, explanation.texts), (True, explanation.raw_texts)):
        whole = score(model, *parts, raw=raw)
        for side, effects in enumerate(texts):
            start = effects.read[0]

            def varied(variant: str, side: int = side, raw: bool = raw) -> float:
                first, second = (variant if side == at else parts[at] for at in (0, 1))
                return score(model, first, second, raw=raw)

            assert effects.whole == pytest.approx(whole, abs=bound)
            assert effects.empty == pytest.approx(varied(""), abs=bound)
            ranks = sorted(unit.rank for unit in effects.units)
            assert ranks == [*range(1, len(effects.units) + 1)]
            for unit in effects.units:
                own = unit.start - start, unit.end - start
                without = varied(left(parts[side], *own))
                assert unit.left_out == pytest.approx(whole - without, abs=2 * bound)
                alone = varied(parts[side][slice(*own)]) - varied("")
                assert unit.alone == pytest.approx(alone, abs=2 * bound)


@pytest.mark.parametrize("kind", ["cosine", "reranker"])
@pytest.mark.parametrize("overflow", ["truncate", "truncate_left"])
def test_variants_of_a_truncated_text_are_of_the_part_that_is_read(
    models: Models, kind: str, overflow: Literal["truncate", "truncate_left"]
) -> None:
    model = models[kind]
    # Words of several tokens, in which the part that is read can begin or end.
    document = " ".join(
        f"Unbelievable{index} w{index}. It was not {index}." for index in range(200)
    )
    result = model.score(
        "w7", document, explain=vitrine.Deletion(by="sentences"), on_overflow=overflow
    )
    assert result.truncated == [True]
    (explanation,) = result.deletions.values()
    (effects,) = explanation.texts
    start, end = effects.read
    assert (start == 0, end == len(document)) == (
        overflow == "truncate",
        overflow == "truncate_left",
    )
    part = document[start:end]
    assert 0 < len(part) < len(document) / 2
    whole = float(model.score("w7", part, on_overflow=overflow).scores[0])
    assert effects.whole == pytest.approx(whole, abs=1e-5)
    assert all(start <= unit.start < unit.end <= end for unit in effects.units)
    unit = effects.units[1]
    without = left(part, unit.start - start, unit.end - start)
    assert unit.left_out == pytest.approx(whole - score(model, "w7", without), abs=1e-5)
    # Neither end of the part is truncated again.
    assert all(unit.left_out for unit in (effects.units[0], effects.units[-1]))


def test_rerank_explains_the_best_documents_and_score_all(models: Models) -> None:
    model, documents = models["cosine"], ["a cat", "a dog", "w7", "a cat sat", "rain"]
    result = model.rerank("cat", documents, explain=vitrine.Deletion())
    assert list(result.deletions) == result.ranking(3)
    two = model.rerank("cat", documents, explain=vitrine.Deletion(top_n=2))
    assert list(two.deletions) == result.ranking(2)
    one = model.rerank("cat", documents, top_n=1, explain=vitrine.Deletion())
    assert list(one.deletions) == result.ranking(1)
    every = model.score("cat", documents, explain=vitrine.Deletion())
    assert sorted(every.deletions) == [*range(5)]
    queries = ["cat", "dog", "w7", "sat", "rain"]
    one = model.score(queries, documents, explain=vitrine.Deletion(top_n=1, of="query"))
    (index,) = one.deletions
    assert index == one.ranking(1)[0]
    (effects,) = one.deletions[index].texts
    assert effects.empty == pytest.approx(score(model, "", documents[index]), abs=5e-6)


@pytest.mark.parametrize("kind", ["cosine", "reranker"])
def test_explained_scores_are_those_of_the_response(models: Models, kind: str) -> None:
    documents = ["a cat", "a dog w7", "w7", "a cat sat. It sat.", "rain"]
    ranked = models[kind].rerank("cat", documents, explain=vitrine.Deletion())
    scored = models[kind].score("cat", documents, explain=vitrine.Deletion())
    for result in (ranked, scored):
        for index, explanation in result.deletions.items():
            assert explanation.texts[0].whole == result.scores[index]
            assert explanation.raw_texts[0].whole == result.raw_scores[index]


def test_texts_that_variants_share_run_once(models: Models) -> None:
    model = models["cosine"]
    # The query, "", "cat cat" and "cat", with two special tokens each.
    result = model.score("dog", "cat cat cat", explain=vitrine.Deletion())
    assert result.explanation_tokens == 3 + 2 + 4 + 3
    # "", "cat", "dog", and the document once for all of them.
    result = model.score("dog cat", "rain", explain=vitrine.Deletion(of="query"))
    assert result.explanation_tokens == 2 + 3 + 3 + 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("document", ["", " \n"])
def test_texts_without_units_have_no_effects(models: Models, kind: str, document: str) -> None:
    deletion = vitrine.Deletion(by="sentences")
    result = models[kind].score(["w5", "w6"], [document, "It. A."], explain=deletion)
    (effects,) = result.deletions[0].texts
    assert list(effects.units) == []
    assert effects.empty == pytest.approx(score(models[kind], "w5", ""), abs=5e-5)
    assert len(result.deletions[1].texts[0].units) == 2
    result = models[kind].score("w5", "", explain=deletion)
    (alone,) = result.deletions[0].texts
    assert (result.explanation_tokens, list(alone.units)) == (0, [])
    assert alone.whole == alone.empty == pytest.approx(effects.empty, abs=5e-5)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[CallOptions]:
    """The options of each run of pairs."""
    runs: list[CallOptions] = []

    async def record(*arguments: object, **named: object) -> vitrine.PairScores:
        own = (*arguments, *named.values())
        runs.append(next(each for each in own if isinstance(each, CallOptions)))
        return await score_pairs(*arguments, **named)  # type: ignore[arg-type]

    score_pairs = scoring.score
    for module in ("scoring", "explanations"):
        monkeypatch.setattr(f"service.inference.model.{module}.score", record)
    return runs


# A variant of a text that just fits can have more tokens, and "error" would refuse it.
@pytest.mark.parametrize(
    ("overflow", "of_variants"), [("error", "truncate"), ("truncate_left", "truncate_left")]
)
def test_variants_are_truncated_if_too_long(
    models: Models, runs: list[CallOptions], overflow: OnOverflow, of_variants: OnOverflow
) -> None:
    models["reranker"].score("a", "b c", explain=vitrine.Deletion(), on_overflow=overflow)
    assert [options.on_overflow for options in runs] == [overflow, of_variants]


@pytest.mark.parametrize(
    ("priority", "of_call", "expected"),
    [
        ("interactive", "interactive", "interactive"),
        ("interactive", "bulk", "bulk"),
        ("bulk", "interactive", "bulk"),
    ],
)
def test_texts_and_variants_have_their_own_priority_within_that_of_the_call(
    models: Models,
    runs: list[CallOptions],
    priority: Priority,
    of_call: Priority,
    expected: Priority,
) -> None:
    deletion = vitrine.Deletion(by="words", priority=priority)
    models["cosine"].score("a", "b c", explain=deletion, priority=of_call)
    assert [options.priority for options in runs] == [expected, expected]


def test_ranked_texts_have_the_priority_of_the_call(
    models: Models, runs: list[CallOptions]
) -> None:
    models["cosine"].rerank("a", ["b c"], explain=vitrine.Deletion(by="words"))
    assert [options.priority for options in runs] == ["interactive", "bulk"]


def test_variants_run_after_the_texts_if_the_queue_has_no_room_for_both(
    small_artifact: Artifact,
) -> None:
    options = vitrine.ModelOptions(threads=1, max_queue_tokens=12)
    with vitrine.SyncModel(small_artifact.path, options) as model:
        result = model.score("cat", "cat dog mat", explain=vitrine.Deletion(by="words"))
    assert result.explanation_tokens > 12
    assert all(unit.left_out is not None for unit in result.deletions[0].texts[0].units)


@pytest.mark.parametrize("labels", [None, vitrine.CandidateLabels(labels=["a", "b"])])
def test_texts_that_are_refused_at_once_are_not_explained(
    models: Models, monkeypatch: pytest.MonkeyPatch, labels: vitrine.CandidateLabels | None
) -> None:
    monkeypatch.setattr(DeletionPlanner, "first", lambda _: pytest.fail("variants are planned"))
    with pytest.raises(vitrine.InvalidInput, match="cannot classify"):
        models["cosine"].classify("a", candidates=labels, explain=True)


def test_errors_name_the_text_of_the_caller_or_none(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, deletion = models["cosine"], vitrine.Deletion()
    for texts, pointer in ((["b", "\ud800"], "/documents/1"), (["\ud800", "b"], "/documents/0")):
        for explain in (deletion, vitrine.Deletion(top_n=1)):
            with pytest.raises(vitrine.InvalidInput) as raised:
                model.score(["a", "a"], texts, explain=explain)
            assert raised.value.pointer == pointer
    with pytest.raises(vitrine.InvalidInput) as raised:
        model.score("a", ["w5 " * 300], explain=deletion, on_overflow="error")
    assert raised.value.pointer == "/documents/0"

    run = LoadedModel.encode_rows
    # The rows of the first run: the query and both documents.
    for failing, row, pointer in (
        (1, 0, "/queries"),
        (1, 2, "/documents/1"),
        (2, 0, "/explain"),
        (2, 3, "/explain"),
    ):
        number = 0

        async def fail(
            *arguments: Any,  # noqa: ANN401
            failing: int = failing,
            row: int = row,
        ) -> Any:  # noqa: ANN401
            nonlocal number
            number += 1
            if number == failing:
                raise vitrine.InferenceFailed("the engine failed on this input", index=row)
            return await run(*arguments)

        monkeypatch.setattr(LoadedModel, "encode_rows", fail)
        with pytest.raises(vitrine.InferenceFailed) as failed:
            model.score("a", ["b c", "d"], explain=deletion)
        assert (failed.value.index, failed.value.pointer) == (
            1 if pointer == "/documents/1" else None,
            pointer,
        )


def test_deadlines_end_explanations(models: Models) -> None:
    with pytest.raises(vitrine.DeadlineExceeded):
        models["cosine"].score("a", "b c", explain=vitrine.Deletion(), timeout_s=0)


def test_variants_for_which_the_tokens_do_not_suffice_have_no_number(models: Models) -> None:
    model = models["cosine"]
    # Query, empty text, three texts of two words, three of one; two special tokens each.
    text = "cat dog mat"
    tokens = model.score("cat", text, explain=vitrine.Deletion(by="words")).explanation_tokens
    assert tokens == 3 + 2 + 3 * 4 + 3 * 3
    text = " ".join(f"w{index}" for index in range(5, 25))
    found = []
    for max_tokens in (1200, 700, 400):
        deletion = vitrine.Deletion(by="words", max_tokens=max_tokens)
        result = model.score("w7 cat", text, explain=deletion)
        assert result.explanation_tokens <= max_tokens
        units = result.deletions[0].texts[0].units
        assert all(unit.alone is not None for unit in units)
        found.append(sum(unit.left_out is not None for unit in units))
    assert found[0] == len(units)
    assert len(units) > found[1] > found[2]
    few = vitrine.Deletion(by="words", max_tokens=60)
    with pytest.raises(vitrine.InvalidInput, match="more than 60 tokens") as raised:
        model.score("w7 cat", text, explain=few)
    assert (raised.value.code, raised.value.pointer) == ("too_many_tokens", "/explain")


def test_variants_of_long_words_take_no_more_memory_than_those_of_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    chars = 0

    def counted(text: str, unit: tuple[int, int]) -> str:
        nonlocal chars
        chars += len(text)
        return without(text, unit)

    monkeypatch.setattr("service.inference.model.deletion_planner.without", counted)
    # A run of more than 100 characters is one token, so that the tokens alone are few.
    document = ("a" * 200 + "!") * 200
    deletion = vitrine.Deletion(by="words", max_tokens=20_000)
    models["cosine"].score("a", document, explain=deletion)
    assert chars <= 16 * 20_000


def test_of_many_pairs_the_first_are_explained_as_far_as_the_tokens_suffice(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, rows = 0, PairRows.rows

    def counted(tokenizer: PairRows, inputs: Sequence[str], *rest: Any, **own: Any) -> Any:  # noqa: ANN401
        nonlocal most
        most = max(most, len(inputs))
        return rows(tokenizer, inputs, *rest, **own)

    monkeypatch.setattr(PairRows, "rows", counted)
    documents = [f"w5 w6 w7 w8 w{index}" for index in range(9, 59)] * 4
    deletion = vitrine.Deletion(by="words", max_tokens=5000)
    result = models["reranker"].score("w5 " * 12, documents, explain=deletion)
    explained = len(result.deletions)
    assert 0 < explained < len(documents)
    assert [*result.deletions][:10] == [*range(10)]
    assert result.explanation_tokens <= 5000
    # No variants of other pairs are made: each of these has six texts at most, with the empty one.
    assert most <= max(len(documents), 11 * explained)


def test_a_pair_whose_units_alone_take_too_many_tokens_leaves_the_others_theirs(
    models: Models,
) -> None:
    documents = ["w5", " ".join(f"w{index}" for index in range(5, 20)), "w6"]
    deletion = vitrine.Deletion(by="words", max_tokens=200)
    # The query is beside each of 15 words.
    result = models["reranker"].score("w5 " * 12, documents, explain=deletion)
    assert [*result.deletions] == [0, 2]


def test_a_pair_for_which_the_tokens_do_not_suffice_leaves_the_variants_of_others(
    models: Models,
) -> None:
    """The query is cut, so that the second pair is a variant of the first one."""
    model, query = models["multi"], "a cat and a dog " * 9
    explained = []
    for max_tokens in range(260, 600, 20):
        deletion = vitrine.Deletion(by="words", of="both", max_tokens=max_tokens)
        result = model.score(query, ["It is a cat.", ""], explain=deletion)
        explained.append([*result.deletions])
        if 0 in result.deletions:
            read, document = result.deletions[0].texts
            (empty,) = model.score(query[slice(*read.read)], "").scores.tolist()
            assert document.empty == pytest.approx(empty, abs=1e-5)
    assert [0] in explained


def test_planning_ends_at_the_deadline() -> None:
    planner = DeletionPlanner(
        model=cast(LoadedModel, None),
        inputs=[("a", "b")],
        order=[0],
        deletion=vitrine.Deletion(),
        limits=(None, None),
        options=CallOptions(deadline=Deadline(1.0, -1.0)),
    )
    with pytest.raises(TimeoutError):
        planner.first()


def test_explanations_need_a_deletion_or_a_bool_and_no_chunks(models: Models) -> None:
    model = models["cosine"]
    with pytest.raises(vitrine.InvalidInput, match="label is for classify") as raised:
        model.rerank("a", ["b"], explain=vitrine.Deletion(label="happy"))
    assert raised.value.pointer == "/explain/label"
    with pytest.raises(vitrine.InvalidInput, match="a bool, a Deletion"):
        model.score("a", "b", explain="words")  # type: ignore[arg-type]
    with pytest.raises(vitrine.InvalidInput, match="does not apply to chunks"):
        model.score("a", "b", explain=vitrine.Deletion(), chunking=vitrine.Chunking())


def test_scores_of_equal_texts_keep_their_order_and_errors_their_index(models: Models) -> None:
    model = models["cosine"]
    documents = ["a cat", "rain", "a cat", "w7 w8", "rain"]
    expected = [score(model, "cat", document) for document in documents]
    assert model.score("cat", documents).scores == pytest.approx(expected, abs=5e-6)
    queries = ["cat", "cat", "dog", "cat", "dog"]
    pairs = zip(queries, documents, strict=True)
    expected = [score(model, *pair) for pair in pairs]
    assert model.score(queries, documents).scores == pytest.approx(expected, abs=5e-6)
    with pytest.raises(vitrine.InvalidInput) as raised:
        model.score(["a", "a", "b"], ["x", "x", "\ud800"])
    assert raised.value.pointer == "/documents/2"
    with pytest.raises(vitrine.InvalidInput) as raised:
        model.score(["a", "a", "\ud800"], ["x", "x", "y"])
    assert raised.value.pointer == "/queries/2"


def test_of_documents_with_more_tokens_than_the_limit_those_that_fit_are_explained(
    models: Models,
) -> None:
    model = models["cosine"]
    long = " ".join(f"w{index} w{index + 1}" for index in range(5, 65))
    documents = [long, "A cat.", "w5 w6", *[f"{long} w{index}" for index in range(5, 10)]]
    deletion = vitrine.Deletion(by="words", max_tokens=300)
    result = model.score("w7", documents, explain=deletion)
    assert result.scores == pytest.approx(model.score("w7", documents).scores, abs=5e-6)
    assert set(result.deletions) == {1, 2}
    assert result.explanation_tokens <= 300
    ranked = model.rerank("w7", documents, explain=deletion, top_n=len(documents))
    assert set(ranked.deletions) <= {1, 2}


def test_a_text_that_fits_is_explained_with_on_overflow_error(models: Models) -> None:
    # Without its hyphen or one of its words the text can have a token more.
    sentence = "A w5-w6 cat. It is w7 w8. "
    text = sentence
    while not models["cosine"].score("w7", text + sentence).truncated[0]:
        text += sentence
    while not models["cosine"].score("w7", f"{text} cat").truncated[0]:
        text = f"{text} cat"
    deletion = vitrine.Deletion(by="auto", max_tokens=20_000)
    result = models["cosine"].score("w7", text, explain=deletion, on_overflow="error")
    assert result.deletions[0].texts[0].words


@pytest.mark.parametrize("kind", ["cosine", "reranker"])
@pytest.mark.parametrize("are_known", [True, False])
def test_a_cut_text_runs_once_if_the_part_that_is_read_has_its_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, are_known: bool
) -> None:
    if not are_known:
        monkeypatch.setattr(VariantTexts, "have_same_rows", lambda *_: False)
    texts: list[vitrine.Row] = []
    variants: list[vitrine.Row] = []
    run = LoadedModel.run

    async def recorded(model: LoadedModel, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        found = await run(model, *arguments, **named)
        (variants if named.get("count_tokens") else texts).extend(found[0])
        return found

    monkeypatch.setattr(LoadedModel, "run", recorded)
    document = " ".join(f"It is w{index} cat w{index + 1}." for index in range(5, 60)) * 2
    tokens = models[kind].score("w7", document).tokens[0]
    deletion = vitrine.Deletion(by="sentences", max_tokens=3 * tokens)
    texts.clear()
    result = models[kind].score("w7", document, explain=deletion)
    assert result.truncated == [True]
    assert result.explanation_tokens == sum(len(row.ids) for row in variants)
    longest = max(texts, key=lambda row: len(row.ids))
    assert (longest.ids in [row.ids for row in variants]) is not are_known
    (text,) = result.deletions[0].texts
    part = document[slice(*text.read)]
    assert text.whole == pytest.approx(score(models[kind], "w7", part), abs=1e-5)
    assert (text.whole == result.scores[0]) or not are_known


def test_inputs_of_the_same_tokens_are_told_from_others(models: Models) -> None:
    for kind in ("cosine", "reranker"):
        texts = VariantTexts(models[kind].model, (None, None), CallOptions())
        long = ("cat", "w5 w6 " * 200)
        assert texts.have_same_rows(long, ("cat", "w5 w6 " * 190))
        assert not texts.have_same_rows(long, ("w7", "w5 w6 " * 190))
        assert not texts.have_same_rows(("cat", "w5"), ("cat", "w6"))


@settings(max_examples=5)
@given(
    sentences=st.lists(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=60).map(" ".join), min_size=2
    )
)
def test_chunks_are_those_of_encode_chunks_and_each_number_is_the_difference_of_two_scores(
    models: Models, sentences: list[str]
) -> None:
    model, document = models["cosine"], ". ".join(sentences)
    result = model.score("w7", document, explain=vitrine.Deletion(by="chunks"))
    (text,) = result.deletions[0].texts
    assert text.by == "chunks"
    part = document[slice(*text.read)]
    chunking = vitrine.Chunking(strategy="sentences", size=64)
    (chunks,) = model.encode_chunks(part, chunking).chunks
    spans = [(chunk.start, chunk.end) for chunk in chunks]
    assert [(unit.start, unit.end) for unit in text.units] == spans
    whole, empty = score(model, "w7", part), score(model, "w7", "")
    for unit in text.units:
        without_it = score(model, "w7", left(part, unit.start, unit.end))
        assert unit.left_out == pytest.approx(whole - without_it, abs=1e-5)
        alone = score(model, "w7", part[unit.start : unit.end])
        assert unit.alone == pytest.approx(alone - empty, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "deletion",
    [
        vitrine.Deletion(by="words"),
        vitrine.Deletion(of="query"),
        vitrine.Deletion(by="words", of="both", method="shapley"),
    ],
)
def test_unknown_parts_of_both_texts_are_those_of_the_tokenizer(
    models: Models, kind: str, deletion: vitrine.Deletion
) -> None:
    model = models[kind]
    texts = "w5 \N{SAUROPOD}w", "w6 \N{THAI CHARACTER KO KAI} w7\N{SAUROPOD} w8"
    result = model.score(*texts, explain=deletion)
    assert result.truncated == [False]
    explanation = result.deletions.get(0) or result.shapley_values[0]
    tokenizer = Tokenizer.from_file(str(model.model.artifact.path / TOKENIZER))
    unknown = tokenizer.token_to_id("[UNK]")
    expected = []
    for text in texts:
        encoding = tokenizer.encode(text)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        expected.append([span for token, span in tokens if token == unknown])
    assert all(expected)
    assert explanation.unknown == expected


def test_unknown_parts_are_those_of_the_part_that_is_read(models: Models) -> None:
    query, document = "w5", f"\N{SAUROPOD} {'w6 ' * 400}\N{SAUROPOD}"
    ends: Mapping[OnOverflow, int] = {"truncate": 0, "truncate_left": len(document) - 1}
    for overflow, start in ends.items():
        result = models["cosine"].score(query, document, explain=True, on_overflow=overflow)
        assert result.deletions[0].unknown == [[], [(start, start + 1)]]


def test_text_of_white_space_has_no_chunks(models: Models) -> None:
    deletion = vitrine.Deletion(by="chunks")
    result = models["cosine"].score("w5", ["", " \n\u00a0", "w6"], explain=deletion)
    assert [len(result.deletions[index].texts[0].units) for index in range(3)] == [0, 0, 1]
