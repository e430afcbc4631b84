"""Tests of `models.panics`."""

import json

import pytest
from tokenizers import Tokenizer, models

from models.panics import LibraryPanic, panics_as_errors


def _load_broken_tokenizer() -> None:
    content = json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())  # noqa: S106 - no password
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    Tokenizer.from_str(json.dumps(content)).encode("a")


def test_panic_of_the_tokenizers_library_is_an_error() -> None:
    with (
        pytest.raises(LibraryPanic, match="the tokenizer panicked: "),
        panics_as_errors("the tokenizer"),
    ):
        _load_broken_tokenizer()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_other_exceptions_pass_unchanged(error: type[BaseException]) -> None:
    with pytest.raises(error), panics_as_errors("the tokenizer"):
        raise error
