"""Arguments of the Python API: what is no text and no token ids is refused with its index."""

import asyncio
import inspect
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from math import inf, nan
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrine
from models.artifact import Artifact
from service.inference.call_options import CallArguments
from service.inference.results.vectors import EncodeOutput

pytestmark = pytest.mark.slow  # opens models of five kinds

Models = dict[str, vitrine.SyncModel]
THREAD = vitrine.ModelOptions(threads=1)
CHUNKS = vitrine.Chunking()


def tokenized(model: vitrine.SyncModel, texts: Any) -> Any:  # noqa: ANN401
    return asyncio.run(model.model.tokenize(texts))


def decoded(model: vitrine.SyncModel, rows: Any) -> Any:  # noqa: ANN401
    return asyncio.run(model.model.decode(rows))


# By name: the model, a call with inputs, and the result as nested lists.
TEXTS_AND_IDS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "encode": ("dense", lambda model, x: model.encode(x).vectors),
    "encode_tokens": ("dense", lambda model, x: np.concatenate(model.encode_tokens(x).vectors)),
    "encode_outputs": (
        "dense",
        lambda model, x: model.encode_outputs(x, ["pooled", "tokens"])["pooled"].vectors,
    ),
    "encode_sparse": (
        "sparse",
        lambda model, x: np.concatenate([v.weights for v in model.encode_sparse(x).vectors]),
    ),
    "encode_multi": ("multi", lambda model, x: np.concatenate(model.encode_multi(x).vectors)),
}
TEXTS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "encode_chunks": (
        "dense",
        lambda model, x: np.concatenate(model.encode_chunks(x, CHUNKS).vectors),
    ),
    "tag": ("tagger", lambda model, x: [e.score for own in model.tag(x).entities for e in own]),
    "classify": ("classifier", lambda model, x: model.classify(x).scores),
    "rerank": ("reranker", lambda model, x: model.rerank("w5", x).scores),
    "score of vectors": ("dense", lambda model, x: model.score("w5", x).scores),
    "score of chunks": ("dense", lambda model, x: model.score("w5", x, chunking=CHUNKS).scores),
    "tokenize": ("dense", lambda model, x: [t[0] for own in tokenized(model, x) for t in own]),
}

GOOD_TEXTS = ["w5 w6", "a cat", " ", "naïve 🎉", np.str_("w7")]
# Rows of ids as callers have them, with the same ids as a list.
IDS: list[tuple[Any, list[int]]] = [
    ([4, 5], [4, 5]),
    ((6,), [6]),
    (range(4, 7), [4, 5, 6]),
    (np.array([4, 5]), [4, 5]),
    (np.array([7, 8, 9], np.uint8), [7, 8, 9]),
    ([np.int64(4), 5], [4, 5]),
    (array("i", [5, 4]), [5, 4]),
    (pd.Series([4, 5], index=[7, 8]), [4, 5]),
    (torch.tensor([9, 4]), [9, 4]),
]
NO_TEXTS = [
    *(None, nan, np.nan, pd.NA, pd.NaT, b"a", bytearray(b"ab"), memoryview(b"ab"), 5, 1.5, True),
    *(np.int64(3), np.float32(3), np.bool_(True), np.array(3), Decimal(3), ..., "cut \ud83d"),
    *({"a": 1}, {1, 2}, iter([4, 5]), ["a"], ["a", "b", "c"], [b"a", b"b"], [nan], [None]),
    *([], (), [[4]], [True], [np.bool_(False)], [4.0], [-1], [4, 10**9], [2**70], [Decimal(3)]),
    *(np.array([[4]]), np.array([4.0]), np.array([True]), np.array([], int), np.array(["a"])),
    *(np.array([-1]), np.array([2**40]), torch.tensor([[4]]), torch.tensor([1.5]), "\udc80"),
]
CONTAINERS: list[Callable[[list[Any]], Any]] = [
    list,
    lambda items: (item for item in items),
    iter,
    deque,
    lambda items: dict(enumerate(items)).values(),
    lambda items: pd.Series(items, index=range(9, 9 + len(items)), dtype=object),
]
# Columns of texts, of which None and NaN are refused.
COLUMNS: list[Callable[[list[Any]], Any]] = [
    pa.array,
    lambda items: pa.chunked_array([items[:1], items[1:]], pa.string()),
    pd.Series,
    lambda items: pd.Series(items, dtype="category"),
    lambda items: np.array(items, object),
    pl.Series,
]


def drawn(good: Sequence[Any], bad: Sequence[Any]) -> st.SearchStrategy[tuple[list[Any], set[int]]]:
    """Draw inputs, and the indices of those that are bad."""
    item = st.sampled_from([(value, False) for value in good])
    item = st.one_of(item, item, st.sampled_from([(value, True) for value in bad]))
    return st.lists(item, min_size=1, max_size=4).map(
        lambda items: (
            [value for value, _ in items],
            {index for index, (_, is_bad) in enumerate(items) if is_bad},
        )
    )


def check(call: Callable[[Any], Any], inputs: Any, plain: list[Any], bad: set[int]) -> None:  # noqa: ANN401
    """Check that bad inputs are named, and that good ones have the results of plain ones."""
    if bad:
        with pytest.raises(vitrine.InvalidInput) as raised:
            call(inputs)
        assert raised.value.index in bad
        assert str(raised.value.index) in (raised.value.pointer or "")
    else:
        np.testing.assert_allclose(call(inputs), call(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TEXTS_AND_IDS)
@settings(max_examples=30)
@given(
    case=drawn([*((text, text) for text in GOOD_TEXTS), *IDS], [(bad, bad) for bad in NO_TEXTS]),
    container=st.sampled_from(CONTAINERS),
)
def test_texts_and_ids(
    models: Models, name: str, case: tuple[list[Any], set[int]], container: Callable[[Any], Any]
) -> None:
    kind, call = TEXTS_AND_IDS[name]
    (pairs, bad) = case
    inputs, plain = ([pair[side] for pair in pairs] for side in (0, 1))
    # An iterator among the inputs is used up by its first call.
    check(lambda inputs: call(models[kind], inputs), container(inputs), plain, bad)


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=30)
@given(
    case=drawn(GOOD_TEXTS, [*NO_TEXTS, *(ids for ids, _ in IDS)]),
    container=st.sampled_from(CONTAINERS),
)
def test_texts(
    models: Models, name: str, case: tuple[list[Any], set[int]], container: Callable[[Any], Any]
) -> None:
    kind, call = TEXTS[name]
    inputs, bad = case
    check(lambda inputs: call(models[kind], inputs), container(inputs), inputs, bad)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", [*TEXTS_AND_IDS, *TEXTS])
def test_columns_of_texts(models: Models, name: str, column: Callable[[list[Any]], Any]) -> None:
    kind, call = {**TEXTS_AND_IDS, **TEXTS}[name]
    texts = ["w5 w6", "a cat", "w5 w6"]
    check(lambda inputs: call(models[kind], inputs), column(texts), texts, set())
    check(lambda inputs: call(models[kind], inputs), column(["w5", None, "w6"]), [], {1})


def test_error_of_python_names_the_input_and_what_it_is(models: Models) -> None:
    model: Any = models["dense"]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: model.encode(["a", nan]), r"^inputs\[1\]: expected .*, not NaN$"),
        (lambda: model.encode(["a", ""]), r"^inputs\[1\]: the text is empty$"),
        (lambda: model.rerank("a", ["a", b"b"]), r"^documents\[1\]: .*, not bytes$"),
        (lambda: model.score(["a", None], ["b", "c"]), r"^queries\[1\]: .*, not None$"),
        (lambda: model.rerank("a", "b"), r"^documents must be a list, not str$"),
        (lambda: model.rerank("a", {"b": 1}), r"^documents must be a list, not dict$"),
        (lambda: model.rerank("a", []), r"^documents must be a non-empty list"),
        (lambda: model.rerank("a", ["b"], top_n=0), r"top_n must be at least 1"),
        (lambda: model.decode("abc"), r"^rows must be a list, not str$"),
        (lambda: model.decode(["abc"]), r"expected a list of token ids, not str$"),
        (lambda: model.tag("a", labels={"b": 1}), r"^labels must be a list, not dict$"),
    ]
    for call, message in cases:
        with pytest.raises(vitrine.InvalidInput, match=message):
            call()


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        ("sparse", "encode", "encode_sparse"),
        ("multi", "encode", "encode_multi"),
        ("dense", "encode_sparse", "encode"),
        ("classifier", "encode", "classify"),
        ("tagger", "classify", "tag"),
    ],
)
def test_error_of_a_wrong_method_names_the_right_one(
    models: Models, kind: str, wrong: str, right: str
) -> None:
    with pytest.raises(vitrine.InvalidInput, match=rf"; call {right}\b") as raised:
        getattr(models[kind], wrong)(["w5"])
    assert "call" not in raised.value.detail  # which clients of HTTP get
    getattr(models[kind], right)(["w5"])


@settings(max_examples=30)
@given(
    case=drawn(
        [("w5", "w6"), ["w5", ""], ("", "w7"), "w8"],
        [
            ("w5", None),
            ("w5",),
            ("a", "b", "c"),
            ("w5", b"a"),
            (1, 2),
            {"a": "b"},
            ("w5", "\ud800"),
        ],
    ),
    container=st.sampled_from(CONTAINERS),
)
def test_pairs(
    models: Models, case: tuple[list[Any], set[int]], container: Callable[[Any], Any]
) -> None:
    inputs, bad = case
    plain = [item if isinstance(item, str) else tuple(item) for item in inputs]
    check(lambda x: models["classifier"].classify(x).scores, container(inputs), plain, bad)


@settings(max_examples=30)
@given(case=drawn(IDS, [(bad, bad) for bad in [*NO_TEXTS, "a"]]))
def test_rows_to_decode(models: Models, case: tuple[list[Any], set[int]]) -> None:
    pairs, bad = case
    rows, plain = ([pair[side] for pair in pairs] for side in (0, 1))
    if bad:
        with pytest.raises(vitrine.InvalidInput) as raised:
            decoded(models["dense"], rows)
        assert raised.value.index in bad
    else:
        assert decoded(models["dense"], rows) == decoded(models["dense"], plain)


NO_LISTS = [None, 5, nan, b"a", {"a": 1}, {"a"}, True, np.array(3), np.int64(3), ...]
NO_LISTS += [pd.DataFrame({"text": ["a"]})]  # iterates over the names of its columns


@pytest.mark.parametrize("value", [*NO_LISTS, [], (), np.array([])], ids=repr)
def test_what_is_no_list_of_inputs_is_refused(models: Models, value: Any) -> None:  # noqa: ANN401
    for name, (kind, call) in {**TEXTS_AND_IDS, **TEXTS}.items():
        if name == "tokenize" and not any(value is other for other in NO_LISTS):
            continue  # no texts have no tokens
        with pytest.raises(vitrine.InvalidInput) as raised:
            call(models[kind], value)
        assert raised.value.pointer is not None, name


@pytest.mark.parametrize("query", [*NO_LISTS, ["a", None]], ids=repr)
def test_what_is_no_query_is_refused(models: Models, query: Any) -> None:  # noqa: ANN401
    with pytest.raises(vitrine.InvalidInput) as raised:
        models["dense"].score(query, ["b", "c"])
    assert raised.value.pointer in ("/queries", "/queries/1")
    with pytest.raises(vitrine.InvalidInput) as raised:
        models["dense"].rerank(query, ["b"])
    assert raised.value.pointer == "/query"


NO_COUNTS = [True, np.bool_(True), 1.5, "3", 0, -1, nan, [3]]
NO_BOOLS = ["no", 1, nan, [], None]
BAD_OPTIONS: dict[str, list[object]] = {
    "prompt_name": [5, b"query", ["query"], True, nan, "unknown"],
    "instruction": [5, b"a", ["a"], True, nan, "", "for models with a template of pairs"],
    "dimensions": [*NO_COUNTS, 10**9],
    "truncate_dim": [*NO_COUNTS, 10**9],
    "top_n": NO_COUNTS,
    "max_tokens_per_query": NO_COUNTS,
    "max_tokens_per_doc": NO_COUNTS,
    "normalize": ["no", 1, nan, []],
    "space": [5, b"v1", ["v1"], True, "unknown"],
    "explain": NO_BOOLS,
    "with_offsets": NO_BOOLS,
    "add_special_tokens": NO_BOOLS,
    "skip_special_tokens": NO_BOOLS,
    "on_overflow": ["cut", None, 1, ["truncate"], b"truncate"],
    "timeout_s": [-1, -0.5, nan, inf, "3", True, [1], Decimal(1)],
    "priority": ["high", None, 1, ["bulk"], b"bulk"],
    "outputs": ["pooled", [], ["vectors"], None, [1], {"pooled"}],
    "chunking": [5, "tokens", {"size": 3}],
    "candidates": [5, "a", ["a"], {"labels": ["a"]}],
    "aggregation": ["last", None, ["none"], 1],
    "labels": ["a", [], 5, {"a": "b"}],
    "threshold": [2, -0.1, "0.5", None, True, nan],
    "nested": NO_BOOLS,
    "multi_label": NO_BOOLS,
    "dtype": ["float64", None, np.float32, ["int8"]],
    "a": [None, "a", ["a", "b"], ["1"], [[1.0], [1.0, 2.0]], [[[1.0]]], [True], {"a": [1.0]}],
    "b": [None, "a", ["a", "b"], ["1"], [[1.0], [1.0, 2.0]], [[[1.0]]], [True], [[1.0, 2.0]]],
}
GOOD_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "encode": ("dense", {"inputs": "a"}),
    "encode_chunks": ("dense", {"texts": "a", "chunking": CHUNKS}),
    "encode_tokens": ("dense", {"inputs": "a"}),
    "encode_sparse": ("sparse", {"inputs": "a"}),
    "encode_multi": ("multi", {"inputs": "a"}),
    "encode_outputs": ("dense", {"inputs": "a", "outputs": ["pooled"]}),
    "quantizer": ("dense", {"dtype": "float32"}),
    "similarity": ("dense", {"a": [[1.0]], "b": [[2.0]]}),
    "classify": ("classifier", {"inputs": "a"}),
    "tag": ("tagger", {"inputs": "a"}),
    "rerank": ("reranker", {"query": "a", "documents": ["a"]}),
    "score": ("reranker", {"queries": "a", "documents": ["a"]}),
    "tokenize": ("dense", {"texts": ["a"]}),
    "decode": ("dense", {"rows": [[4]]}),
}


@pytest.mark.parametrize("name", GOOD_CALLS)
def test_every_invalid_option_is_named(models: Models, name: str) -> None:
    kind, good = GOOD_CALLS[name]
    model = models[kind].model

    def call(**options: object) -> object:
        result = getattr(model, name)(**{**good, **options})
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    options = set(inspect.signature(getattr(model, name)).parameters)
    if "options" in options:
        options = options - {"options"} | get_type_hints(CallArguments).keys()
    options -= {"inputs", "texts", "query", "queries", "documents", "rows"}
    for option in sorted(options):
        for value in BAD_OPTIONS[option]:
            with pytest.raises(vitrine.InvalidInput) as raised:
                call(**{option: value})
            assert raised.value.pointer == f"/{option}", (option, value)
    if name == "encode_chunks":
        with pytest.raises(vitrine.InvalidInput, match="chunking must be a Chunking"):
            call(chunking=None)


@pytest.mark.parametrize(
    ("kind", "output", "option"),
    [
        ("dense", "tokens", {"dimensions": 2}),
        ("dense", "tokens", {"truncate_dim": 2}),
        ("multi", "multi", {"dimensions": 2}),
        ("sparse", "sparse", {"normalize": False}),
    ],
)
def test_options_that_apply_to_no_output_are_refused(
    models: Models, kind: str, output: EncodeOutput, option: dict[str, Any]
) -> None:
    (name,) = option
    with pytest.raises(
        vitrine.InvalidInput, match=f'{name} does not apply to the output "{output}"'
    ) as raised:
        models[kind].encode_outputs("a", [output], **option)
    assert raised.value.pointer == f"/{name}"


def test_every_public_method_is_tested() -> None:
    methods = {
        name
        for name, _ in inspect.getmembers(vitrine.Model, inspect.isfunction)
        if name in vars(vitrine.Model) and not name.startswith("_")
    }
    assert methods == GOOD_CALLS.keys()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("strategy", ["words", 3, None, ["tokens"]]),
        ("size", [True, 1.5, "3", 0, -1, nan]),
        ("overlap", [True, 1.5, "3", -1, nan, None]),
        ("late", ["no", 1, None]),
    ],
)
def test_invalid_options_of_chunking_are_named(option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(vitrine.InvalidInput) as raised:
            vitrine.Chunking(**{option: value})
        assert raised.value.pointer == f"/chunking/{option}"


def test_numbers_of_numpy_are_numbers(models: Models) -> None:
    model = models["dense"]
    expected = model.encode(["a", "b"], dimensions=5, normalize=False).vectors
    options: dict[str, Any] = {
        "dimensions": np.int64(5),
        "timeout_s": np.float32(60),
        "normalize": np.bool_(False),
    }
    np.testing.assert_array_equal(model.encode(["a", "b"], **options).vectors, expected)
    chunking = vitrine.Chunking(size=np.int32(3), overlap=np.int32(1))  # type: ignore[arg-type]
    plain = model.encode_chunks("a b c d e", vitrine.Chunking(size=3, overlap=1))
    assert model.encode_chunks("a b c d e", chunking).chunks == plain.chunks


def test_table_of_ids_is_its_rows(models: Models) -> None:
    table = np.array([[4, 5, 6], [7, 8, 9]])
    expected = models["dense"].encode(table.tolist()).vectors
    np.testing.assert_allclose(models["dense"].encode(table).vectors, expected)  # type: ignore[arg-type]


async def test_call_beside_an_invalid_one_is_answered(small_artifact: Artifact) -> None:
    async with await vitrine.open_model(small_artifact.path, THREAD) as model:
        expected = (await model.encode(["a dog"])).vectors
        for value in [*NO_TEXTS, ""]:
            if isinstance(value, Iterator):
                continue
            bad, good = await asyncio.gather(
                model.encode(["a cat", value]), model.encode(["a dog"]), return_exceptions=True
            )
            assert isinstance(bad, vitrine.InvalidInput)
            assert bad.index == 1
            assert not isinstance(good, BaseException)
            np.testing.assert_allclose(good.vectors, expected, atol=1e-6)
