"""The application with a stub engine: faults, deadlines and overload."""

import pkgutil
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.engines import Agreement, BatchSizes, Engine, Output, Precision, Run
from models.packing import PackedBatch
from service.api.errors import headers_of
from service.app import create_app
from service.inference.errors import Overloaded
from service.inference.model import opening
from service.inference.model.opening import open_model
from service.inference.tokenizing.tokenizer import TextTokenizer
from service.settings import BatchSettings, EngineSettings, ModelSettings, Settings
from tests.eventually import eventually
from tests.serving import ready_model, serving, state_of, values_of

POISON = 2000  # the token id on which the stub engine fails


class PanicException(BaseException):
    """As a Rust extension raises when it panics: not an Exception."""


class StubEngine:
    """Returns the first token id of each row as its vector; `fault` applies to POISON."""

    name = "onnxruntime"
    target = "cpu"
    precision: Precision = "float32"
    threads = 1
    streams = 1
    weight_bytes = 4096
    batches = BatchSizes(max_tokens=512, min_split_tokens=64, fixed_cost=8)

    def __init__(self) -> None:
        self.runs: Sequence[Run] = (self.run_outputs,)
        self.fault: str | None = None
        self.gate = threading.Event()
        self.ran: list[int] = []

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        return self.run_outputs(batch, (output,))[0]

    def run_outputs(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]]:
        assert tuple(outputs) == ("pooled",)
        self.ran.append(batch.rows)
        if self.fault == "always":
            raise RuntimeError("engine fault")
        first = batch.input_ids[batch.padded_index[:, 0]]
        vectors = np.repeat(first[:, None], 384, 1).astype(np.float32)
        if POISON in batch.input_ids and self.fault is not None:
            if self.fault == "hang":
                self.gate.wait(60)
            elif self.fault == "raise":
                raise RuntimeError("engine fault")
            else:
                vectors[first == POISON] = float(self.fault)
        return [vectors]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubEngine]:
    engine = StubEngine()

    def opened(*_: object) -> Engine:
        return engine

    monkeypatch.setattr(opening, "open_engine", opened)
    monkeypatch.setattr(opening, "self_check", lambda *_: {})
    yield engine
    engine.gate.set()


@contextmanager
def stubbed(settings: Settings, **changes: object) -> Iterator[tuple[TestClient, list[str]]]:
    reasons: list[str] = []
    # A run that a test holds does not time out, however long the test takes.
    patient = {"engine": settings.engine.model_copy(update={"timeout_s": 3600.0})}
    app = create_app(settings.model_copy(update=patient | changes), on_fatal=reasons.append)
    with serving(app) as client:
        yield client, reasons


def encode(client: TestClient, *first_ids: int) -> tuple[int, dict[str, object]]:
    body = {"inputs": [[first] for first in first_ids], "normalize": False, "dimensions": 1}
    response = client.post("/encode", json=body)
    return response.status_code, response.json()


@pytest.mark.parametrize("fault", ["raise", "nan", "inf", "-inf"])
def test_failed_input_is_named_and_the_next_request_works(
    stub: StubEngine, settings: Settings, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with stubbed(settings) as (client, reasons):
        stub.fault = fault
        inputs = list(range(100, 131))
        inputs[17] = POISON
        status, problem = encode(client, *inputs)
        assert status == 500
        assert (problem["code"], problem["index"]) == ("inference_failed", 17)
        assert problem["pointer"] == "/inputs/17"
        assert "engine fault" not in str(problem)
        assert str(problem["request_id"]) in caplog.text
        assert ("engine fault" if fault == "raise" else "NotFinite") in caplog.text
        status, body = encode(client, 7, 8)
        assert (status, body["embeddings"]) == (200, [[7.0], [8.0]])
        assert client.get("/readyz").status_code == 200
        assert reasons == []


def test_stuck_engine_fails_its_requests_and_the_readiness_probe(
    stub: StubEngine, settings: Settings
) -> None:
    hasty = settings.engine.model_copy(update={"timeout_s": 0.2})
    with stubbed(settings, engine=hasty) as (client, reasons):
        stub.fault = "hang"
        status, problem = encode(client, POISON)
        assert (status, problem["code"]) == (503, "not_ready")
        response = client.get("/readyz")
        assert response.status_code == 503
        assert response.headers["Retry-After"] == "1"
        assert client.get("/healthz").status_code == 200
        assert encode(client, 1)[0] == 503
        assert reasons == ["the engine has stopped: a batch did not return within 0.2 s"]


def test_broken_engine_fails_the_readiness_probe_and_reports_the_reason(
    stub: StubEngine, settings: Settings
) -> None:
    with stubbed(settings) as (client, reasons):
        stub.fault = "always"
        assert encode(client, 1, 2, 3)[0] == 503
        assert client.get("/readyz").status_code == 503
        assert reasons == ["the engine has stopped: the engine fails on an input of the self-check"]


def queued_tokens(client: TestClient) -> float:
    return values_of(client.get("/metrics").text)["vitrine_queue_tokens"]


def test_full_queue_returns_429_with_retry_after(stub: StubEngine, settings: Settings) -> None:
    with stubbed(settings, batch=BatchSettings(max_cost=1, max_queue_tokens=4)) as (client, _):
        stub.fault = "hang"
        running = threading.Thread(target=encode, args=(client, POISON))
        running.start()
        eventually(lambda: stub.ran)
        waiting = threading.Thread(target=encode, args=(client, 1, 2, 3))
        waiting.start()
        eventually(lambda: queued_tokens(client) == 3)
        response = client.post("/encode", json={"inputs": [[4], [5]]})
        assert (response.status_code, response.json()["code"]) == (429, "overloaded")
        assert response.headers["Retry-After"] == "1"
        stub.gate.set()
        running.join()
        waiting.join()
        assert encode(client, 4, 5)[0] == 200


@pytest.mark.parametrize(
    "step",
    ["service.api.routes.encode_json", "service.inference.tokenizing.tokenizer.TextTokenizer.rows"],
)
def test_tokenization_and_serialization_of_large_requests_do_not_block_others(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    begun, others_answered = threading.Event(), threading.Event()
    real = pkgutil.resolve_name(step)

    def waiting(*arguments: object, **named: object) -> object:
        begun.set()
        assert others_answered.wait(60), "nobody was answered meanwhile"
        return real(*arguments, **named)

    monkeypatch.setattr(step, waiting)
    with ThreadPoolExecutor(1) as clients:
        large = clients.submit(client.post, "/encode", json={"inputs": ["a text"] * 1000})
        assert begun.wait(60)
        assert client.get("/healthz").status_code == 200
        others_answered.set()
        assert len(large.result().json()["embeddings"]) == 1000


def test_full_queue_is_reported_before_tokenization(
    stub: StubEngine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stubbed(settings, batch=BatchSettings(max_cost=1, max_queue_tokens=3)) as (client, _):
        stub.fault = "hang"
        with ThreadPoolExecutor(2) as clients:
            running = clients.submit(encode, client, POISON)
            eventually(lambda: stub.ran)
            waiting = clients.submit(encode, client, 1, 2, 3)
            eventually(lambda: queued_tokens(client) == 3)
            with monkeypatch.context() as patch:
                patch.setattr(
                    "service.inference.tokenizing.tokenizer.TextTokenizer.rows", pytest.fail
                )
                assert encode(client, 4)[0] == 429
            stub.gate.set()
            assert running.result()[0] == waiting.result()[0] == 200


@pytest.mark.parametrize(
    ("route", "step", "long"),
    [
        ("/encode", "rows", {"inputs": ["word " * 1000] * 2}),
        ("/tei/tokenize", "tokenize", {"inputs": ["word " * 1000] * 2}),
        ("/tei/decode", "decode", {"ids": [[1000] * 5000] * 2}),
    ],
)
def test_tokenizer_backlog_is_bounded_and_short_inputs_bypass_it(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    step: str,
    long: dict[str, list[object]],
) -> None:
    begun, others_answered = threading.Event(), threading.Event()
    real = getattr(TextTokenizer, step)

    def waiting(
        self: TextTokenizer, inputs: Sequence[object], *more: object, **named: object
    ) -> object:
        if len(inputs) == 2:
            begun.set()
            assert others_answered.wait(60), "nobody was answered meanwhile"
        return real(self, inputs, *more, **named)

    monkeypatch.setattr(TextTokenizer, step, waiting)
    monkeypatch.setattr(opening, "_MAX_CHARS_IN_THREADS", 15_000)
    app = create_app(settings, on_fatal=pytest.fail)
    with serving(app) as client, ThreadPoolExecutor(1) as clients:
        in_flight = clients.submit(client.post, route, json=long)
        assert begun.wait(60)
        refused = client.post(route, json=long)
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        assert client.post("/encode", json={"inputs": "short"}).status_code == 200
        others_answered.set()
        assert in_flight.result().status_code == 200
        assert client.post(route, json=long).status_code == 200


@pytest.mark.parametrize("route", ["/tei/tokenize", "/tei/decode"])
def test_tokenizer_routes_return_504_after_their_deadline(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(TextTokenizer, "tokenize", lambda *_: gate.wait(60))
    monkeypatch.setattr(TextTokenizer, "decode", lambda *_: gate.wait(60))
    field, inputs = ("ids", [[1000] * 5000]) if route.endswith("decode") else ("inputs", ["a"] * 9)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        headers = {"X-Request-Timeout-Ms": "50"}
        assert client.post(route, json={field: inputs}, headers=headers).status_code == 504
        gate.set()


def test_exceeded_deadline_returns_504_and_removes_the_request_from_the_queue(
    stub: StubEngine, settings: Settings
) -> None:
    with (
        stubbed(settings, batch=BatchSettings(max_cost=1)) as (client, _),
        ThreadPoolExecutor(1) as clients,
    ):
        stub.fault = "hang"
        running = clients.submit(encode, client, POISON)
        eventually(lambda: stub.ran)
        late = client.post(
            "/encode", json={"inputs": [[4], [5]]}, headers={"X-Request-Timeout-Ms": "50"}
        )
        assert (late.status_code, late.json()["code"]) == (504, "deadline")
        assert "deadline of 0.0" in late.json()["detail"]
        assert queued_tokens(client) == 0
        stub.gate.set()
        assert running.result()[0] == 200
        assert encode(client, 6)[0] == 200
        assert sum(stub.ran) == 2


def test_request_that_would_miss_its_deadline_returns_429_and_is_not_run(
    stub: StubEngine, settings: Settings
) -> None:
    with (
        stubbed(settings, batch=BatchSettings(max_cost=1)) as (client, _),
        ThreadPoolExecutor(2) as clients,
    ):
        assert encode(client, 1)[0] == 200  # measures the throughput
        runner = ready_model(client).batcher._runner
        eventually(lambda: runner.token_s)  # recorded after the response
        runner._recent_s, runner._recent_tokens = 3.0, 1.0
        stub.fault = "hang"
        running = clients.submit(encode, client, POISON)
        eventually(lambda: stub.ran[-1:] == [1] and len(stub.ran) == 2)
        waiting = clients.submit(encode, client, 2, 3)
        eventually(lambda: queued_tokens(client) == 2)
        late = client.post(
            "/encode", json={"inputs": [[4], [5]]}, headers={"X-Request-Timeout-Ms": "2000"}
        )
        assert (late.status_code, late.json()["code"]) == (429, "overloaded")
        # 12 s in the queue, less the rest of 2 s; 10.0 s unless the machine is slow.
        match = re.search(r"would exceed its deadline by (\S+) s", late.json()["detail"])
        assert match is not None
        assert float(match[1]) >= 10
        assert 10 <= int(late.headers["Retry-After"]) <= 60
        stub.gate.set()
        assert running.result()[0] == waiting.result()[0] == 200
        assert sum(stub.ran) == 1 + 1 + 2


def test_client_cannot_extend_the_deadline_and_its_own_has_another_status_in_metrics(
    stub: StubEngine, settings: Settings
) -> None:
    limits = settings.limits.model_copy(update={"request_s": 0.05})
    with stubbed(settings, limits=limits) as (client, _):
        stub.fault = "hang"
        for value, deadline_s in ((None, 0.05), ("20", 0.02), ("60000", 0.05)):
            headers = {} if value is None else {"X-Request-Timeout-Ms": value}
            late = client.post("/encode", json={"inputs": [[POISON]]}, headers=headers)
            assert late.status_code == 504
            assert late.json()["detail"] == f"deadline of {deadline_s} s exceeded"
        exposed = client.get("/metrics").text
        assert 'vitrine_requests_total{route="/encode",status="504"} 2.0' in exposed
        assert 'vitrine_requests_total{route="/encode",status="client_deadline"} 1.0' in exposed
        stub.gate.set()


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "NaN", "1" + "0" * 20, "²", "1 ms"])
def test_invalid_deadline_header_returns_400(client: TestClient, value: str) -> None:
    headers = [(b"X-Request-Timeout-Ms", value.encode("latin-1"))]
    response = client.post("/encode", json={"inputs": "a"}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "timeout")


def test_retry_after_is_in_whole_seconds_and_spread_over_clients() -> None:
    def retry_after(seconds: float) -> set[str]:
        return {headers_of(Overloaded("", seconds))["Retry-After"] for _ in range(300)}

    assert retry_after(0.0) == retry_after(0.2) == {"1"}
    assert retry_after(10.0) == {"11", "12", "13", "14", "15"}
    assert retry_after(1e9) == {"60"}


def test_unexpected_error_returns_500_without_its_message(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret message")

    with monkeypatch.context() as patch:
        patch.setattr("service.api.routes.encode_json", broken)
        response = client.post("/encode", json={"inputs": "a"})
    assert response.status_code == 500
    assert response.json()["code"] == "internal"
    assert response.json()["request_id"] == response.headers["X-Request-Id"]
    assert "secret" not in response.text
    assert "a secret message" in caplog.text
    assert client.post("/encode", json={"inputs": "a"}).status_code == 200


def test_panic_of_a_library_returns_500_as_json(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def panic() -> None:
        raise PanicException

    with monkeypatch.context() as patch:
        patch.setattr(state_of(client).registry, "statuses", panic)
        response = client.get("/models")
    assert (response.status_code, response.json()["code"]) == (500, "internal")
    assert "LibraryPanic: a library panicked" in caplog.text
    assert client.get("/models").is_success


def test_tokenizer_panic_returns_500_and_the_next_request_works(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Panicking:
        def encode(self, *_: object, **__: object) -> None:
            raise PanicException

        encode_batch_fast = encode

    for inputs in ("é", ["é"] * 100):  # no plain texts, which the library need not tokenise
        with monkeypatch.context() as patch:
            tokenizer = ready_model(client).tokenizer
            patch.setattr(tokenizer.shared, "variant", lambda *_, **__: Panicking())
            response = client.post("/encode", json={"inputs": inputs})
        assert (response.status_code, response.json()["code"]) == (500, "internal")
        assert caplog.text.count("LibraryPanic: the tokenizer panicked") == 1
        caplog.clear()
        assert client.post("/encode", json={"inputs": "a"}).status_code == 200


@pytest.mark.usefixtures("stub")
def test_service_is_alive_and_unready_while_the_model_loads(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = threading.Event()

    def slow_check(*_: object) -> dict[Output, Agreement]:
        assert checked.wait(60)
        return {}

    monkeypatch.setattr(opening, "self_check", slow_check)
    with TestClient(create_app(settings)) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").status_code == 503
        status, problem = encode(client, 1)
        assert (status, problem["detail"]) == (503, "the model is loading")
        checked.set()
        eventually(lambda: client.get("/readyz").status_code == 200)
        assert encode(client, 1)[0] == 200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": ModelSettings(path=Path("nowhere"))}, "nowhere is not an artifact"),
        ({"engine": EngineSettings(name="tensorrt")}, "unknown engine 'tensorrt'"),
    ],
)
def test_failed_startup_reports_the_reason_and_is_never_ready(
    settings: Settings, changes: dict[str, object], reason: str
) -> None:
    reasons: list[str] = []
    app = create_app(settings.model_copy(update=changes), on_fatal=reasons.append)
    with TestClient(app) as client:
        eventually(lambda: reasons)
        assert client.get("/readyz").status_code == 503
    assert reasons[0].startswith("cannot start: ")
    assert reason in reasons[0]


async def test_gpu_warm_up_runs_one_row_and_a_batch_of_each_length_on_all_streams(
    artifact: Artifact, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "target", "cuda")
    monkeypatch.setattr(stub, "streams", 2)
    async with await open_model(artifact.path):
        pass
    # Rows of 256, 128, ... 1 tokens. The budget is 512; 384 pairs cost as much as a token.
    assert stub.ran[:6] == [1, 1, 1, 1, 3, 3]
    assert stub.ran[-2:] == [510, 510]
