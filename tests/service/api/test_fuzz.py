"""The fuzzer finds no defects in the service, and finds seeded ones."""

import json
from types import SimpleNamespace

import orjson
import pytest
from starlette.testclient import TestClient

from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.fuzz import fuzz

pytestmark = pytest.mark.slow


def test_fuzzer_finds_no_defects(client: TestClient) -> None:
    assert fuzz(client, 1_500, seed=1) == []


def test_fuzzer_finds_lone_surrogates_that_neither_parser_nor_tokenizer_refuses(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lenient(body: bytes) -> object:
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise orjson.JSONDecodeError(str(error), "", 0) from None

    monkeypatch.setattr("service.api.body.orjson", SimpleNamespace(**vars(orjson)))
    monkeypatch.setattr("service.api.body.orjson.loads", lenient)
    monkeypatch.setattr(TextTokenizer, "check_text", lambda *_: None)
    findings = fuzz(client, 1_500)
    assert any(b"ud800" in f.body or b"udfff" in f.body for f in findings if f.why == "status 500")


def test_fuzzer_finds_missing_validation_of_token_ids(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextTokenizer, "_check_ids", lambda *_: None)
    assert "status 500" in {finding.why for finding in fuzz(client, 1_500)}
