"""Bodies in gzip, and the memory budget of bodies."""

import gzip
import json
import zlib

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.api.body_budget import BodyBudget
from service.api.http_protocol import Cycle
from service.inference.errors import Overloaded
from tests.serving import served, state_of

BODY = json.dumps({"inputs": ["a text", "another"]}).encode()
HEADERS = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
KIB = 1024


@pytest.mark.parametrize(
    ("max_bytes", "more_body", "disconnected", "is_short"),
    [
        (4, False, False, True),
        (3, False, False, False),
        (4, True, False, False),
        (4, False, True, False),
    ],
)
def test_body_is_short_if_it_is_whole_and_within_the_limit(
    max_bytes: int, more_body: bool, disconnected: bool, is_short: bool
) -> None:
    cycle = Cycle.__new__(Cycle)
    cycle.body, cycle.more_body, cycle.disconnected = bytearray(b"body"), more_body, disconnected
    assert cycle.short_body(max_bytes) == (b"body" if is_short else None)


def test_gzip_body_is_decompressed(client: TestClient) -> None:
    plain = client.post("/encode", content=BODY, headers={"Content-Type": "application/json"})
    for name in ("gzip", "x-gzip", "GZip"):
        headers = {**HEADERS, "Content-Encoding": name}
        packed = client.post("/encode", content=gzip.compress(BODY), headers=headers)
        assert packed.status_code == 200
        expected, actual = plain.json()["embeddings"], packed.json()["embeddings"]
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(BODY, id="uncompressed"),
        pytest.param(zlib.compress(BODY), id="zlib"),
        pytest.param(gzip.compress(BODY)[:-1], id="truncated"),
        pytest.param(gzip.compress(BODY)[:-4] + b"\0\0\0\0", id="wrong length"),
        pytest.param(gzip.compress(BODY) + b"more", id="trailing bytes"),
        pytest.param(gzip.compress(BODY) * 2, id="two members"),
        pytest.param(gzip.compress(b"not JSON"), id="not JSON"),
    ],
)
def test_invalid_gzip_body_returns_400(client: TestClient, content: bytes) -> None:
    response = client.post("/encode", content=content, headers=HEADERS)
    assert (response.status_code, response.json()["code"]) == (400, "malformed")
    assert (
        client.post(
            "/encode",
            content=BODY.replace(b"{", b"{ "),
            headers={"Content-Type": "application/json"},
        ).status_code
        == 200
    )


def test_gzip_bomb_returns_413_at_the_limit(client: TestClient) -> None:
    bomb = gzip.compress(b" " * 128 * 2**20)
    assert len(bomb) < 2**18
    response = client.post("/encode", content=bomb, headers=HEADERS)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert "decompressed" in response.json()["detail"]


def test_budget_refuses_large_bodies_beyond_it_and_accepts_all_small_ones() -> None:
    budget = BodyBudget(300 * KIB)
    with budget.reservation() as first, budget.reservation() as second:
        first(200 * KIB)
        with pytest.raises(Overloaded):
            second(101 * KIB)
        second(64 * KIB)
        second(100 * KIB)
        with pytest.raises(Overloaded):  # a body that grows
            second(101 * KIB)
        with budget.reservation() as third:
            third(64 * KIB)
            with pytest.raises(Overloaded):
                third(65 * KIB)
    with budget.reservation() as later:
        later(300 * KIB)


def test_budget_accepts_a_single_body_of_any_size() -> None:
    budget = BodyBudget(100 * KIB)
    for sizes in ([200], [90, 200]):  # the second one grows, as without Content-Length or in gzip
        with budget.reservation() as reserve:
            for size in sizes:
                reserve(size * KIB)


def test_exhausted_body_budget_returns_429_for_large_bodies(small_artifact: Artifact) -> None:
    large = json.dumps({"inputs": "a"}).encode() + b" " * 80 * KIB
    headers = {"Content-Type": "application/json"}
    with served(small_artifact.path, limits={"max_bodies_bytes": 100 * KIB}) as client:
        with state_of(client).body_budget.reservation() as reserve:
            reserve(90 * KIB)
            for content in (large, iter([large])):  # with and without Content-Length
                response = client.post("/encode", content=content, headers=headers)
                assert (response.status_code, response.json()["code"]) == (429, "overloaded")
                assert response.headers["Retry-After"] == "1"
            packed = gzip.compress(large, compresslevel=0)
            assert client.post("/encode", content=packed, headers=HEADERS).status_code == 429
            assert client.post("/encode", json={"inputs": "small"}).status_code == 200
        assert client.post("/encode", content=large, headers=headers).status_code == 200
