"""Evaluations with the vectors of running servers."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.artifact import Artifact
from service.bulk.options import BulkError, OptionError
from service.evaluation import server
from service.evaluation.collection import CollectionFiles, read_collection
from service.evaluation.command_line import main
from service.evaluation.server import ServerJob, encode_on_server
from tests.service.evaluation.conftest import Evaluate
from tests.serving import lines_until, process

Answer = Callable[[dict[str, Any]], httpx2.Response]
# Lets requests be answered by a function, and returns the list of their bodies.
Answered = Callable[[Answer], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def url(small_artifact: Artifact) -> Iterator[str]:
    with process(VITRINE_MODEL__PATH=str(small_artifact.path)) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "path"), [("vitrine", ""), ("openai", ""), ("tei", "/tei")])
def test_vectors_of_a_server_have_the_same_measures_as_the_model(
    url: str, finished: Path, collection: Path, tmp_path: Path, contract: str, path: str
) -> None:
    expected = json.loads((finished / "results.json").read_text())
    arguments = [str(tmp_path / "server"), "--beir", str(collection)]
    arguments += ["--server", f"{url}{path}", "--contract", contract]
    arguments += ["--model", "small"] if contract == "openai" else []
    arguments += ["--measures", ",".join(expected["measures"])]
    assert main([*arguments, "--against", str(finished)]) == 0
    results = json.loads((tmp_path / "server" / "results.json").read_text())
    assert results["measures"] == expected["measures"]
    assert results["jobs"]["documents"]["contract"] == contract


@pytest.mark.slow
def test_report_says_that_scores_of_a_server_are_not_explained(
    url: str, run: Evaluate, collection: Path, other_artifact: Artifact, tmp_path: Path
) -> None:
    run(output=tmp_path / "model", model=other_artifact.path)
    arguments = [str(tmp_path / "server"), "--beir", str(collection)]
    arguments += ["--server", url, "--contract", "vitrine"]
    assert main([*arguments, "--against", str(tmp_path / "model")]) == 0
    report = (tmp_path / "server" / "comparison.html").read_text()
    assert report.count(f"its vectors are those of the server {url}") == 5
    assert report.count("The old model, by its scores") == 5


@pytest.fixture
def texts(collection: Path, tmp_path: Path) -> Path:
    """The documents of the collection in their Parquet file."""
    return read_collection(CollectionFiles.in_folder(collection, "test"), tmp_path).documents


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Answered:
    monkeypatch.setattr(server, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(server, "_PART_ROWS", 64)
    client = httpx2.AsyncClient

    def by(answer: Answer) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []

        def handle(request: httpx2.Request) -> httpx2.Response:
            bodies.append({**json.loads(request.content), "url": str(request.url)})
            return answer(bodies[-1])

        transport = httpx2.MockTransport(handle)
        monkeypatch.setattr(httpx2, "AsyncClient", lambda **own: client(transport=transport, **own))
        return bodies

    return by


def vectors(body: dict[str, Any]) -> httpx2.Response:
    data = [
        {"index": i, "embedding": [float(len(text)), 1.0]} for i, text in enumerate(body["input"])
    ]
    return httpx2.Response(200, json={"data": data[::-1]})


JOB = ServerJob("http://host/", "openai", "name", "passage: ")


def encode(texts: Path, output: Path, job: ServerJob = JOB, stop: bool = False) -> bool:
    async def run() -> bool:
        event = asyncio.Event()
        if stop:
            event.set()
        return await encode_on_server(job, texts, output, event)

    return asyncio.run(run())


def test_parts_are_kept_and_the_rest_is_asked_for(
    texts: Path, answered: Answered, tmp_path: Path
) -> None:
    bodies = answered(vectors)
    output = tmp_path / "vectors"
    assert not encode(texts, output, stop=True)
    assert sum(len(body["input"]) for body in bodies) == 64
    assert encode(texts, output)
    assert sum(len(body["input"]) for body in bodies) == 150
    assert {(body["url"], body["model"]) for body in bodies} == {
        ("http://host/v1/embeddings", "name")
    }
    table = pq.read_table(output)
    expected = pq.read_table(texts).column("text").to_pylist()
    assert table["row"].to_pylist() == list(range(150))
    assert [own[0] for own in table["embedding"].to_pylist()] == [
        len(f"passage: {text}") for text in expected
    ]
    with pytest.raises(OptionError, match="vectors of another server or of other texts"):
        encode(texts, output, ServerJob("http://other", "openai"))


@pytest.mark.parametrize(
    "changed",
    [
        lambda body: httpx2.Response(
            200,
            json={
                "data": [{"index": i, "embedding": [1.0] * 3} for i in range(len(body["input"]))]
            },
        ),
        lambda body: httpx2.Response(
            200, content=vectors(body).content, headers={"X-Model-Version": "other"}
        ),
    ],
)
def test_parts_of_another_model_are_refused(
    texts: Path, answered: Answered, tmp_path: Path, changed: Answer
) -> None:
    answered(vectors)
    assert not encode(texts, tmp_path / "vectors", stop=True)
    answered(changed)
    with pytest.raises(BulkError, match="the server has another model by now"):
        encode(texts, tmp_path / "vectors")


def test_other_file_in_place_of_a_part_is_named(
    texts: Path, answered: Answered, tmp_path: Path
) -> None:
    answered(vectors)
    part = tmp_path / "vectors" / "part-00000.parquet"
    assert not encode(texts, part.parent, stop=True)
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(BulkError, match=r"part-00000.parquet cannot be read: Parquet magic"):
        encode(texts, part.parent)
    pq.write_table(pa.table({"row": [1]}), part)
    with pytest.raises(OptionError, match="vectors of another server or of other texts"):
        encode(texts, part.parent)


def refusing(texts: Path, rows: slice, status: int = 422) -> Answer:
    """Return an answer that refuses the texts of some rows."""
    refused = {f"passage: {text}" for text in pq.read_table(texts)["text"].to_pylist()[rows]}

    def answer(body: dict[str, Any]) -> httpx2.Response:
        is_refused = not refused.isdisjoint(body["input"])
        return httpx2.Response(status, text="no") if is_refused else vectors(body)

    return answer


@pytest.mark.parametrize(
    ("rows", "status"), [(slice(70, 71), 413), (slice(128, 150), 422)], ids=["one", "the last"]
)
def test_texts_that_the_server_refuses_are_errors_and_the_others_are_encoded(
    texts: Path, answered: Answered, tmp_path: Path, rows: slice, status: int
) -> None:
    answered(refusing(texts, rows, status))
    assert encode(texts, tmp_path / "vectors")
    table = pq.read_table(tmp_path / "vectors")
    errors = {row: error for row, error in enumerate(table["error"].to_pylist()) if error}
    assert errors == dict.fromkeys(range(150)[rows], f"{status}: no")
    assert table["embedding"].null_count == len(errors)


def test_part_of_which_the_server_refuses_all_texts_is_an_error(
    texts: Path, answered: Answered, tmp_path: Path
) -> None:
    answered(refusing(texts, slice(64, 150)))
    with pytest.raises(BulkError, match="refuses all of 64 texts, the first: 422: no"):
        encode(texts, tmp_path / "vectors")


@pytest.mark.parametrize("key", ["secret\n", " secret", "se\tcret", "\u043a\u043b\u044e\u0447"])
def test_key_that_no_header_has_is_refused_and_not_shown(
    texts: Path, tmp_path: Path, key: str
) -> None:
    with pytest.raises(OptionError, match="the API key must have printable ASCII") as error:
        encode(texts, tmp_path / "vectors", ServerJob("http://host", "openai", "name", key=key))
    assert key.strip() not in str(error.value)


def test_request_is_sent_again_when_the_server_is_busy(
    texts: Path, answered: Answered, tmp_path: Path
) -> None:
    answers = iter([503, 429, *[200] * 100])

    def answer(body: dict[str, Any]) -> httpx2.Response:
        status = next(answers)
        return vectors(body) if status == 200 else httpx2.Response(status)

    answered(answer)
    assert encode(texts, tmp_path / "vectors")
    assert pq.read_table(tmp_path / "vectors")["error"].null_count == 150


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx2.Response(503), "it answers 503; start again"),
        (httpx2.Response(401), "answers 401"),
        (httpx2.Response(422, text="no"), "refuses all of 64 texts, the first: 422: no"),
        (httpx2.Response(200, json={"data": []}), "something else than one vector for each text"),
        (
            httpx2.Response(200, json={"data": [{"index": 0, "embedding": [None, 1.0]}]}),
            "one vector",
        ),
        (httpx2.Response(200, json={"data": [{"index": 0, "embedding": [[1.0]]}]}), "one vector"),
        (httpx2.Response(200, text="hello"), "something else than one vector for each text"),
    ],
)
def test_servers_that_give_no_vectors_are_named(
    texts: Path,
    answered: Answered,
    tmp_path: Path,
    response: httpx2.Response,
    message: str,
) -> None:
    answered(lambda _: response)
    with pytest.raises(BulkError, match=message) as error:
        encode(texts, tmp_path / "vectors")
    assert "http://host/v1/embeddings" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --model, or --server"),
        (["--server", "http://host"], "OpenAI's contract needs --model"),
        (
            ["--server", "http://host", "--contract", "tei", "--model", "x"],
            "has no names of models",
        ),
        (["--server", "http://a:b@host", "--model", "x"], "--server has a password"),
        (["--model", "x", "--contract", "tei"], "--contract needs --server"),
        (["--model", "x", "--rerank-top", "5"], "--rerank-top needs --reranker"),
        (["--model", "x", "--query-prefix", "q: "], "are for --server"),
        (
            ["--server", "http://host", "--dimensions", "8"],
            "--dimensions applies to models in this",
        ),
        (
            ["--server", "http://host", "--chunk-size", "8"],
            "--chunk-size applies to models in this",
        ),
        (["--server", "http://host", "--query-prompt", "q"], "--query-prompt applies to models in"),
        (["--server", "http://host", "--precision", "int8"], "--precision applies to models in"),
        (["--server", "host:8000", "--model", "x"], "--server must be a URL, such as http://"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    collection: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert main([str(tmp_path / "output"), "--beir", str(collection), *options]) == 2
    assert message in capsys.readouterr().err
