"""The fuzzer finds nothing in the service, and finds what is planted there."""

import json

import pytest
from starlette.testclient import TestClient

from service.tokenizer import TextTokenizer
from tests.fuzz import fuzz


def test_nothing_is_found(client: TestClient) -> None:
    assert fuzz(client, 1_500, seed=1) == []


def test_a_parser_that_takes_half_surrogates_is_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.body.orjson.loads", json.loads)
    assert "status 500" in {finding.why for finding in fuzz(client, 1_500)}


def test_ids_that_nobody_checks_are_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextTokenizer, "_check_ids", lambda *_: None)
    assert "status 500" in {finding.why for finding in fuzz(client, 1_500)}
