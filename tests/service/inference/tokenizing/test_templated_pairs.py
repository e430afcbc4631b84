"""Pairs in templates: of Qwen3-Reranker, with a body of one text, and of mxbai-rerank, with two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding, Tokenizer

from models.artifact import Artifact
from models.export.pair_template import PUBLISHED
from models.manifest import ArtifactError
from service.inference.call_options import NO_OPTIONS
from service.inference.results.chunked_texts import ChunkedTexts
from service.inference.tokenizing.chunking import Chunking
from service.inference.tokenizing.pair_rows import PairRows
from service.inference.tokenizing.pairs import NO_LIMITS, PairLimits
from service.inference.tokenizing.shared_tokenizers import SharedTokenizer
from service.inference.tokenizing.templated_pairs import TemplatedPairs
from tests.models.checkpoints import save_chatml
from tests.small_tokenizers import served_by

# Each digit and each space is a token, wherever a text ends.
QUERY, DOCUMENT = "1 2 3 4 5", "6 7 8 9 0 " * 60
LONG = "1 2 3 4 5 " * 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SharedTokenizer:
    folder = tmp_path_factory.mktemp("chatml")
    save_chatml(folder)
    return SharedTokenizer((folder / "tokenizer.json").read_bytes())


def pairs_of(tokenizer: SharedTokenizer, name: str, room: int = 200) -> TemplatedPairs:
    """Return pairs with a number of tokens between prefix and suffix."""
    template = PUBLISHED[name].template
    fixed = [template.prefix, template.suffix]
    plain = tokenizer.variant(None).encode_batch(fixed, add_special_tokens=False)
    return TemplatedPairs(template, tokenizer, sum(map(len, plain)) + room, 10**6)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("pair", [(QUERY, DOCUMENT), (LONG, DOCUMENT), (LONG, "6"), (QUERY, "6")])
def test_texts_that_are_left_give_the_same_row(
    tokenizer: SharedTokenizer, name: str, pair: tuple[str, str]
) -> None:
    templated = pairs_of(tokenizer, name)
    (row,), (is_too_long,) = templated.rows([pair], "", NO_LIMITS)
    query, document = templated.read_spans(pair, "", NO_LIMITS)
    read = pair[0][slice(*query)], pair[1][slice(*document)]
    (same,), _ = templated.rows([read], "", NO_LIMITS)
    assert same.ids == row.ids
    assert row.truncated == is_too_long == (read != pair)


@pytest.mark.parametrize("name", PUBLISHED)
def test_room_is_what_a_document_can_grow_by(tokenizer: SharedTokenizer, name: str) -> None:
    templated = pairs_of(tokenizer, name)
    room = templated.room((QUERY, "6"), "", NO_LIMITS)
    for more, is_too_long in [(room, False), (room + 1, True)]:
        pair = QUERY, "6" * (1 + more)
        assert templated.rows([pair], "", NO_LIMITS)[1] == [is_too_long]
        assert templated.room(pair, "", NO_LIMITS) == room - more


def test_limits_of_texts_need_no_further_tokenizers(tokenizer: SharedTokenizer) -> None:
    templated = pairs_of(tokenizer, "qwen3-reranker")
    templated.rows([(QUERY, DOCUMENT)], "", NO_LIMITS)
    count = len(tokenizer._variants)
    for limit in (1, 7, 150, 10**6):
        (row,), _ = templated.rows([(QUERY, DOCUMENT)], "", (None, limit))
        cut = QUERY, DOCUMENT[:limit]  # each character is a token
        (expected,), _ = templated.rows([cut], "", NO_LIMITS)
        assert row.ids == expected.ids
        assert row.truncated
    assert len(tokenizer._variants) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_tokenizers_are_made_in_advance(tmp_path: Path, name: str) -> None:
    save_chatml(tmp_path)
    shared = SharedTokenizer((tmp_path / "tokenizer.json").read_bytes())
    templated = pairs_of(shared, name)
    made = set(shared._variants)
    templated.rows([(LONG, DOCUMENT)], "Find.", (3, 3))
    templated.read_spans((LONG, DOCUMENT), "", NO_LIMITS)
    templated.room((LONG, DOCUMENT), "", NO_LIMITS)
    assert templated.has_room("Find.")
    assert set(shared._variants) == made


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_that_spells_the_unknown_token_is_not_unknown(
    small_artifact: Artifact, tmp_path: Path, name: str
) -> None:
    save_chatml(tmp_path)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    file.add_special_tokens(["<unk>"])
    template = PUBLISHED[name].template
    manifest = replace(small_artifact.manifest, outputs=("logits",), pair_template=template)
    artifact = replace(small_artifact, manifest=manifest)
    served = served_by(file, artifact, tmp_path, max_tokens=400)
    assert served.unknown_id is not None
    pair = "a <unk>", "\N{SAUROPOD} <unk>"
    (row,) = PairRows(served).rows([pair], None, "truncate")
    assert served.unknown_id not in row.ids
    assert PairRows(served).unknown_spans(pair, None, "truncate", NO_LIMITS) == ([], [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_instruction_must_leave_room_for_a_query(tokenizer: SharedTokenizer, name: str) -> None:
    templated = pairs_of(tokenizer, name)
    rows = {
        length: templated.rows([("6", "7"), ("8", "7")], "1" * length, NO_LIMITS)[0]
        for length in range(100, 200)
    }
    for length, (first, second) in rows.items():
        assert templated.has_room("1" * length) == (first.ids != second.ids)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("limits", [NO_LIMITS, (400, None)])
def test_query_of_many_documents_is_tokenised_a_few_times(
    tokenizer: SharedTokenizer, name: str, limits: PairLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    templated = pairs_of(tokenizer, name)
    pairs = [(LONG * 20, f"{number} dogs") for number in range(100)]
    expected = [templated.rows([pair], "", limits) for pair in pairs]
    seen: list[int] = []
    ordinary = templated._encodings._encode

    def counting(*arguments: Any) -> list[Encoding]:  # noqa: ANN401
        seen.extend(map(len, arguments[-1]))
        return ordinary(*arguments)

    monkeypatch.setattr(templated._encodings, "_encode", counting)
    rows, are_too_long = templated.rows(pairs, "", limits)
    assert [([row], [own]) for row, own in zip(rows, are_too_long, strict=True)] == expected
    assert sum(length > 300 for length in seen) <= 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_have_the_spans_of_their_texts(tokenizer: SharedTokenizer, name: str) -> None:
    pair = "naïve cat", "日本 dog"
    spellings, spans, indices = pairs_of(tokenizer, name).tokens(pair, "Find a cat.")
    (row,), _ = pairs_of(tokenizer, name).rows([pair], "Find a cat.", NO_LIMITS)
    vocabulary = tokenizer.variant(None)
    assert [vocabulary.token_to_id(spelling) for spelling in spellings] == row.ids
    for index, text in enumerate(pair):
        own = [span for span, number in zip(spans, indices, strict=True) if number == index]
        covered = {at for span in own if span is not None for at in range(*span)}
        assert covered == set(range(len(text)))
    assert all(
        (span is None) == (index is None) for span, index in zip(spans, indices, strict=True)
    )


def test_chunk_fits_although_its_tokens_depend_on_the_text_before_it(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    # "prereceipt" has more tokens than "pre" and "receipt".
    save_chatml(tmp_path)
    template = replace(PUBLISHED["qwen3-reranker"].template, before_document=" pre")
    manifest = replace(small_artifact.manifest, outputs=("logits",), pair_template=template)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    artifact = replace(small_artifact, manifest=manifest)
    tokenizer = served_by(file, artifact, tmp_path, max_tokens=260)
    text = "receipt. " * 40 + "except The delivered " * 20
    chunked = ChunkedTexts(tokenizer, [text], Chunking(), 10**6)
    rows = chunked.pair_rows(PairRows(tokenizer), [QUERY], NO_LIMITS, NO_OPTIONS)
    assert 250 <= max(len(row.ids) for row in rows) <= 260
    assert not any(row.truncated for row in rows)


def test_instruction_is_optional_in_the_template_of_mxbai() -> None:
    template = PUBLISHED["mxbai-rerank-v2"].template
    assert template.takes_instruction
    assert template.body("q", "d", "") == ("query: q", "\ndocument: d")
    assert template.body("q", "d", "i") == ("instruction: i\nquery: q", "\ndocument: d")


@pytest.mark.parametrize("name", PUBLISHED)
def test_template_without_room_is_refused(tokenizer: SharedTokenizer, name: str) -> None:
    with pytest.raises(ArtifactError, match="gives the template of pairs"):
        pairs_of(tokenizer, name, room=0)
