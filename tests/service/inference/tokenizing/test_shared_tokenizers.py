"""Tests of tokenizers that models share."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from models.artifact import TOKENIZER, Artifact
from service.inference.tokenizing.shared_tokenizers import SharedTokenizer, shared_tokenizer

TEXT = "one two three four five six seven"


@pytest.fixture
def content(small_artifact: Artifact) -> bytes:
    """The content of a tokenizer file."""
    return small_artifact.read(TOKENIZER)


def test_equal_files_share_a_tokenizer_and_others_do_not(content: bytes) -> None:
    first = shared_tokenizer(content)
    assert shared_tokenizer(bytes(content)) is first
    assert shared_tokenizer(content + b"\n") is not first


def test_threads_that_load_equal_files_get_one_tokenizer(content: bytes) -> None:
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(shared_tokenizer, [content] * 32))
        assert len({id(shared) for shared in loaded}) == 1
        variants = list(pool.map(loaded[0].variant, [5, 6] * 16))
    assert len({id(variant) for variant in variants}) == 2


def test_tokenizer_is_freed_with_its_last_user(content: bytes) -> None:
    users = [shared_tokenizer(content + b" "), shared_tokenizer(content + b" ")]
    kept = weakref.ref(users[0])
    users.pop()
    gc.collect()
    assert kept() is not None
    users.pop()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("first", [None, 4])
def test_variants_truncate_as_the_library_does(content: bytes, first: int | None) -> None:
    shared = SharedTokenizer(content)
    shared.variant(first)
    for limit, side in ((4, "right"), (4, "left"), (6, "right"), (None, "right")):
        oracle = Tokenizer.from_buffer(content)
        oracle.no_truncation()
        if limit is not None:
            oracle.enable_truncation(limit, direction=side)
        variant = shared.variant(limit, is_left=side == "left")
        assert variant.encode(TEXT).ids == oracle.encode(TEXT).ids
