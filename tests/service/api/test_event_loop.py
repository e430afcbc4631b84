"""The event loop does not block on large requests."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.api import body, responses
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.serving import served

# The step of a request: the owner and the name of its function.
TOKENIZE = TextTokenizer, "rows"
PARSE = body, "_parse"
SERIALIZE = responses, "serialize_rows"


@pytest.mark.parametrize(
    ("step", "inputs", "is_inline"),
    [
        (TOKENIZE, ["short"], True),
        (TOKENIZE, ["word " * 5_000], False),
        (TOKENIZE, ["short"] * 100, False),
        (PARSE, ["short"], True),
        (PARSE, ["word " * 14_000], False),
        (SERIALIZE, ["short"], True),
        (SERIALIZE, ["short"] * 1_000, False),
    ],
)
def test_steps_of_large_requests_run_outside_the_event_loop(
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[object, str],
    inputs: list[str],
    is_inline: bool,
) -> None:
    threads = threads_of(monkeypatch, *step)
    assert client.post("/encode", json={"inputs": inputs}).status_code == 200
    assert (threads == [event_loop_thread(client)]) == is_inline


def test_responses_are_compressed_outside_the_event_loop(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch, responses.gzip, "compress")  # type: ignore[attr-defined]
    with served(small_artifact.path, server={"gzip": True}) as client:
        assert client.post("/encode", json={"inputs": ["text"] * 9}).status_code == 200
        assert threads
        assert event_loop_thread(client) not in threads


# orjson holds the interpreter's lock during a call: other threads run only between calls.
def test_rows_are_serialized_in_calls_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def dumps(value: np.ndarray, option: int) -> bytes:
        sizes.append(value.size)
        return orjson.dumps(value, option=option | orjson.OPT_SERIALIZE_NUMPY)

    library = SimpleNamespace(dumps=dumps, Fragment=orjson.Fragment, OPT_SERIALIZE_NUMPY=0)
    monkeypatch.setattr(responses, "orjson", library)
    responses.serialize_rows(np.zeros((50, 384), np.float32), in_base64=False)
    assert sizes == [384] * 50


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[int]:
    """The threads in which a function is called, from now on."""
    threads: list[int] = []
    function: Callable[..., object] = getattr(owner, name)

    def recorded(*arguments: object, **named: object) -> object:
        threads.append(threading.get_ident())
        return function(*arguments, **named)

    monkeypatch.setattr(owner, name, recorded)
    return threads


def event_loop_thread(client: TestClient) -> int:
    assert client.portal is not None
    return client.portal.call(threading.get_ident)
