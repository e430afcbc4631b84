"""OpenTelemetry traces, as a receiver on this machine gets them."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from models.artifact import Artifact
from models.engines import weight_bytes
from service.api import tracing
from service.api.schemas import VERSION
from service.app import create_app
from service.inference.model.opening import ModelOptions, open_model
from service.inference.results.batch_run import BatchItem, run_batch
from service.inference.tokenizing.rows import Row
from service.request_trace import RequestTrace
from service.settings import Settings, traces_endpoint
from tests.eventually import HANG_S
from tests.receiver import Receiver, attributes, receiving
from tests.service.api.conftest import Start
from tests.service.api.posting import stages
from tests.service.api.raw_http import HOST, get, post
from tests.serving import (
    PATIENCE_S,
    connect,
    lines_until,
    outcome,
    received,
    rest,
    served,
)

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
STAGES = ["read", "tokenize", "queue", "batch", "serialize", "send"]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver to which applications created in the test export their spans at once."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        yield receiver


@pytest.fixture
def client(small_artifact: Artifact, receiver: Receiver) -> Iterator[TestClient]:  # noqa: ARG001 - its variables
    with served(small_artifact.path) as client:
        yield client


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def test_request_has_a_server_span_with_the_attributes_of_the_conventions(
    client: TestClient, receiver: Receiver
) -> None:
    response = client.post("/encode", json={"inputs": "a"}, headers={"X-Request-Id": "an-id"})
    assert response.status_code == 200
    [span] = receiver.wait()
    assert span.name == "POST /encode"
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert attributes(span) == {
        "http.request.method": "POST",
        "http.route": "/encode",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/encode",
        "network.protocol.version": "1.1",
        "server.address": "testserver",
        "server.port": 80,
        "client.address": "testclient",
        "client.port": 50000,
        "vitrine.request_id": "an-id",
    }
    resource = receiver.resources[0]
    assert (resource["service.name"], resource["service.version"]) == ("vitrine", VERSION)


def test_stages_are_child_spans_that_add_up_to_the_request(
    client: TestClient, receiver: Receiver
) -> None:
    body = {"inputs": [f"text {i}" * (1 + i % 7) for i in range(100)]}
    assert client.post("/encode", json=body).status_code == 200
    [server] = receiver.wait()
    children = receiver.children(server)
    assert names(children) == STAGES
    edges = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in children]
    assert edges[0][0] == server.start_time_unix_nano
    assert edges[-1][1] == server.end_time_unix_nano
    for (start, end), (following, _) in zip(edges, [*edges[1:], (edges[-1][1], 0)], strict=True):
        assert start <= end == following


def test_spans_of_the_stages_have_the_durations_of_server_timing(
    client: TestClient, receiver: Receiver
) -> None:
    timing = stages(client.post("/encode", json={"inputs": "a text"}))
    [server] = receiver.wait()
    durations = {
        span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        for span in receiver.children(server)
    }
    assert durations["queue"] == pytest.approx(timing["queue"], abs=0.001)
    assert durations["batch"] == pytest.approx(timing["infer"], abs=0.001)
    # These begin at the end of the previous stage, a little earlier.
    assert durations["tokenize"] >= timing["tokenize"] - 0.001
    assert durations["serialize"] >= timing["serialize"] - 0.001


def test_lookup_in_the_cache_is_a_stage(receiver: Receiver, small_artifact: Artifact) -> None:
    with served(small_artifact.path, cache={"max_bytes": 2**20}) as client:
        client.post("/encode", json={"inputs": "a text"})
        [server] = receiver.wait()
    assert names(receiver.children(server)) == [*STAGES[:2], "cache", *STAGES[2:]]


def test_wait_for_a_load_is_a_stage(
    receiver: Receiver, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    paths = {"cats": small_artifact.path, "dogs": other_artifact.path}
    two = [{"name": name, "path": path} for name, path in paths.items()]
    with served(models={"served": two, "max_bytes": weight_bytes(small_artifact)}) as client:
        for _ in range(2):
            assert client.post("/encode", json={"inputs": "a", "model": "dogs"}).is_success
        first, second = receiver.wait(2)
    assert names(receiver.children(first)) == ["read", "load", *STAGES[1:]]
    assert names(receiver.children(second)) == STAGES


def test_explanation_is_a_stage(client: TestClient, receiver: Receiver) -> None:
    for method in ("terms", "deletion", "shapley"):
        body = {"queries": "a cat", "documents": ["a dog"], "explain": {"method": method}}
        server = receiver.span_of(client.post("/score", json=body))
        assert names(receiver.children(server)) == [*STAGES[:4], "explain", *STAGES[4:]]


async def test_requests_of_a_batch_are_linked(small_artifact: Artifact) -> None:
    options = ModelOptions(threads=1)
    async with await open_model(small_artifact.path, options) as model:
        alone, *both = (RequestTrace({"trace_id": "a", "span_id": span}) for span in "abc")
        items = [BatchItem(Row([1, 2], False, 0), ("pooled",), trace) for trace in (*both, None)]
        run_batch(model.engine, model.metrics, None, [replace(items[0], trace=alone)])
        run_batch(model.engine, model.metrics, None, items)
    assert alone.batched.keys() == {"a"}
    assert all(trace.batched.keys() == {"b", "c"} for trace in both)


def test_batch_span_has_links_to_the_other_requests(
    client: TestClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"trace_id": TRACE_ID, "span_id": PARENT_ID}

    def link(batch: list[BatchItem]) -> None:
        for item in batch:
            assert item.trace is not None
            item.trace.batched[item.trace.ids["span_id"]] = item.trace.ids
            item.trace.batched[PARENT_ID] = other

    monkeypatch.setattr("service.inference.results.batch_run._link_traces", link)
    client.post("/encode", json={"inputs": ["a", "b"]})
    [server] = receiver.wait()
    links = {
        span.name: [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        for span in receiver.children(server)
        if span.links
    }
    assert links == {"batch": [(TRACE_ID, PARENT_ID)]}


def test_traceparent_is_continued(client: TestClient, receiver: Receiver) -> None:
    client.post("/encode", json={"inputs": "a"}, headers={"traceparent": TRACEPARENT})
    [server] = receiver.wait()
    assert server.trace_id.hex() == TRACE_ID
    assert server.parent_span_id.hex() == PARENT_ID
    assert len(receiver.children(server)) == len(STAGES)


def test_malformed_traceparent_is_ignored(client: TestClient, receiver: Receiver) -> None:
    for header in (
        "",
        "nonsense",
        f"00-{TRACE_ID}-{PARENT_ID}",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
    ):
        response = client.post("/encode", json={"inputs": "a"}, headers={"traceparent": header})
        assert response.status_code == 200
        server = receiver.span_of(response)
        assert not server.parent_span_id, header
        assert server.trace_id.hex() not in (TRACE_ID, "0" * 32), header


def test_headers_that_cannot_be_read_are_not_logged(
    client: TestClient, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    for headers in (
        {"baggage": "canary"},
        {"baggage": "canary" * 1000 + "=a"},
        {"traceparent": TRACEPARENT, "tracestate": "CANARY canary"},
    ):
        assert client.post("/encode", json={"inputs": "a"}, headers=headers).status_code == 200
        receiver.wait()
    assert "canary" not in caplog.text


def test_unsampled_requests_are_not_exported(client: TestClient, receiver: Receiver) -> None:
    unsampled = f"{TRACEPARENT[:-2]}00"
    client.post("/encode", json={"inputs": "a"}, headers={"traceparent": unsampled})
    assert "trace_id" not in client.get("/metrics", headers={"Accept": OPENMETRICS}).text
    client.post("/encode", json={"inputs": "a"})
    [server] = receiver.wait()
    assert server.trace_id.hex() != TRACE_ID


def test_sampler_is_that_of_the_variable(
    receiver: Receiver, small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with served(small_artifact.path) as client:
        client.post("/encode", json={"inputs": "a"})
        client.post("/encode", json={"inputs": "a"}, headers={"traceparent": TRACEPARENT})
        receiver.wait()
    assert [span.trace_id.hex() for span in receiver.servers()] == [TRACE_ID]


def test_service_name_is_that_of_the_variable(
    receiver: Receiver, small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with served(small_artifact.path) as client:
        client.get("/info")
        receiver.wait()
    resource = receiver.resources[0]
    assert resource["service.name"] == "search"
    assert resource["deployment.environment.name"] == "test"


def test_errors_of_the_service_have_error_status_and_those_of_clients_do_not(
    receiver: Receiver, settings: Settings
) -> None:
    path = settings.model.path / "nowhere"
    nowhere = settings.model_copy(
        update={"model": settings.model.model_copy(update={"path": path})}
    )
    with TestClient(create_app(nowhere, on_fatal=lambda _: None)) as client:
        assert client.post("/encode", json={"inputs": "a"}).status_code == 503
        assert client.post("/encode", content=b"{").status_code == 415
        failed, refused = receiver.wait(2)
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"] == "503"
    assert names(receiver.children(failed)) == ["read"]
    assert refused.status.code == Status.STATUS_CODE_UNSET
    assert attributes(refused)["http.response.status_code"] == 415


@pytest.mark.parametrize(("status", "error_type"), [(200, "OSError"), (None, "disconnected")])
async def test_incomplete_response_has_an_error_type(
    receiver: Receiver, status: int | None, error_type: str
) -> None:
    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        scope["state"]["request_id"] = "an-id"
        if status is not None:
            await send({"type": "http.response.start", "status": status})
            raise OSError

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": "/", "scheme": "http", "http_version": "1.1"}
    exporter = tracing.Exporter(f"{receiver.url}/v1/traces")
    with suppress(OSError):
        await exporter.trace(app)({**scope, "headers": []}, receive, send)
    exporter.close()
    [span] = receiver.servers()
    assert attributes(span)["error.type"] == error_type
    assert (span.status.code == Status.STATUS_CODE_ERROR) == (status is not None)


def test_head_request_has_the_attributes_of_its_route(
    client: TestClient, receiver: Receiver
) -> None:
    client.head("/models")
    [span] = receiver.wait()
    assert span.name == "HEAD /models"
    assert attributes(span)["http.route"] == attributes(span)["url.path"] == "/models"
    assert attributes(span)["http.request.method"] == "HEAD"


def test_unknown_paths_and_methods_are_not_exported(client: TestClient, receiver: Receiver) -> None:
    client.get("/canary")
    client.request("CANARY", "/encode")
    spans = receiver.wait(2)
    assert names(spans) == ["GET", "HTTP /encode"]
    assert attributes(spans[1])["http.request.method"] == "_OTHER"
    assert "canary" not in str(receiver.spans).lower()


def test_probes_and_scrapes_are_not_traced(client: TestClient, receiver: Receiver) -> None:
    for path in ("/health", "/healthz", "/readyz", "/metrics", "/info"):
        client.get(path)
    [span] = receiver.wait()
    assert span.name == "GET /info"


def test_openmetrics_has_exemplars_with_the_trace(client: TestClient, receiver: Receiver) -> None:
    client.post("/encode", json={"inputs": "a"}, headers={"traceparent": TRACEPARENT})
    [server] = receiver.wait()
    response = client.get("/metrics", headers={"Accept": OPENMETRICS})
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    labels = {"trace_id": TRACE_ID, "span_id": server.span_id.hex()}
    traced = {
        (sample.name, sample.labels.get("stage"))
        for family in text_string_to_metric_families(response.text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == labels
    }
    stages = ("tokenize", "queue", "infer", "serialize")
    assert traced == {
        ("vitrine_request_seconds_bucket", None),
        *(("vitrine_stage_seconds_bucket", stage) for stage in stages),
    }


def test_metrics_are_plain_text_unless_openmetrics_is_accepted(
    client: TestClient, receiver: Receiver
) -> None:
    client.post("/encode", json={"inputs": "a"})
    receiver.wait()
    response = client.get("/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "trace_id" not in response.text


def test_shutdown_does_not_wait_for_an_unreachable_receiver(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = tracing.Exporter(receiver.url)
    is_reachable, has_ended = threading.Event(), threading.Event()

    def shutdown() -> None:
        is_reachable.wait(HANG_S)
        has_ended.set()

    own = exporter._provider.shutdown
    monkeypatch.setattr(exporter._provider, "shutdown", shutdown)
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.01)
    exporter.close()
    assert not has_ended.is_set()
    is_reachable.set()
    own()


# A traced request, and one that is not traced and starts in the context of the former.
PIPELINED = post(b"traceparent: %s\r\n" % TRACEPARENT.encode()) + get(
    headers=HOST + b"Connection: close\r\n"
)

# Starts the service where a package of the extra is missing.
WITHOUT_EXPORTER = """
import sys
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
from service.serve_command import main
sys.exit(main())
"""

# Starts the service, and prints at its end the modules that traces need.
LISTING = """
import atexit, sys
modules = ("opentelemetry.sdk", "opentelemetry.exporter", "service.api.tracing", "requests")
atexit.register(lambda: print("imported:", *[m for m in modules if m in sys.modules],
                              file=sys.stderr))
from service.serve_command import main
sys.exit(main())
"""


@pytest.mark.slow
def test_nothing_is_imported_for_traces_that_are_off(start: Start) -> None:
    with start("-c", LISTING) as started:
        lines, match = lines_until(started, r"Serving .* on (http://\S+)")
        headers = {"traceparent": TRACEPARENT}
        body = {"inputs": "a text"}
        url = f"{match[1]}/encode"
        response = httpx2.post(url, json=body, headers=headers, timeout=PATIENCE_S)
        assert response.status_code == 200
        started.send_signal(signal.SIGINT)
        assert rest(started)[1].splitlines()[-1] == "imported:"
    assert not any("traces" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines_of_a_traced_request_have_its_ids(start: Start, log_format: str) -> None:
    with (
        receiving() as receiver,
        start(
            VITRINE_SERVER__LOG=log_format,
            VITRINE_SERVER__ACCESS_LOG="true",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url.replace("//", "//user:password@"),
        ) as started,
    ):
        lines, match = lines_until(started, r"Serving .* on (http://[^\s\"]+)")
        assert any(f"Exporting traces to {receiver.url}/v1/traces" in line for line in lines)
        assert "password" not in str(lines)
        with connect(match[1]) as connection:
            connection.sendall(PIPELINED)
            responses = received(connection)
        assert responses.count(b"HTTP/1.1 200 ") == 2
        started.send_signal(signal.SIGINT)  # the last spans are exported at the end
        status, errors = rest(started)
        assert status == 0
        [server] = receiver.servers()
    traced, untraced = [line for line in errors.splitlines() if " 200 " in line]
    ids = {"trace_id": TRACE_ID, "span_id": server.span_id.hex()}
    if log_format == "json":
        assert ids.items() <= json.loads(traced).items()
        assert not ids.keys() & json.loads(untraced).keys()
    else:
        assert traced.endswith(f" trace_id={TRACE_ID} span_id={ids['span_id']}")
        assert "trace_id" not in untraced


@pytest.mark.slow
def test_missing_extra_stops_the_start_and_is_named(start: Start) -> None:
    with start(
        *("-c", WITHOUT_EXPORTER), OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318"
    ) as started:
        status, errors = outcome(started)
    assert status == 2
    assert "pip install '.[otel]'" in errors


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "127.0.0.1:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT must be"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "a:1"},
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT must be",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"},
            r"a variable OTEL_BSP_\* is invalid: max_queue_size must be",
        ),
        *(
            (
                {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://127.0.0.1:1", name: "/nowhere"},
                f"{name}: /nowhere cannot be read",
            )
            for kind in ("", "TRACES_")
            for file in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
            for name in (f"OTEL_EXPORTER_OTLP_{kind}{file}",)
        ),
    ],
)
def test_unsupported_variable_stops_the_start(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        create_app(settings)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, "http://a:1/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1/b/"}, "http://a:1/b/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:1/b"}, "http://a:1/b"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "https://a:1",
                "OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere",  # of other signals
                "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": __file__,
            },
            "https://a:1/v1/traces",
        ),
    ],
)
def test_endpoint_is_that_of_the_standard_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces_endpoint() == expected
