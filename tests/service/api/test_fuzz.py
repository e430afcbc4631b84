"""The fuzzer finds nothing in the service, and finds what is planted there."""

import json
from types import SimpleNamespace

import orjson
import pytest
from starlette.testclient import TestClient

from service.inference.tokenizer import TextTokenizer
from tests.fuzz import fuzz


def test_nothing_is_found(client: TestClient) -> None:
    assert fuzz(client, 1_500, seed=1) == []


def test_a_parser_that_takes_half_surrogates_is_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lenient(given: bytes) -> object:
        try:
            return json.loads(given)
        except (ValueError, RecursionError) as error:
            raise orjson.JSONDecodeError(str(error), "", 0) from None

    monkeypatch.setattr("service.api.body.orjson", SimpleNamespace(**vars(orjson)))
    monkeypatch.setattr("service.api.body.orjson.loads", lenient)
    found = fuzz(client, 1_500)
    assert any(b"ud800" in f.body or b"udfff" in f.body for f in found if f.why == "status 500")


def test_ids_that_nobody_checks_are_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextTokenizer, "_check_ids", lambda *_: None)
    assert "status 500" in {finding.why for finding in fuzz(client, 1_500)}
