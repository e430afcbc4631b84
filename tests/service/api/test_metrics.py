"""Metrics: every input received has one outcome."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.manifest import TOKENIZER
from models.quantization import read_calibration
from service.api.metrics import Metrics
from service.debug.pipeline.messages import JOB_KINDS
from service.inference.results.metrics import ModelMetrics
from tests.eventually import eventually
from tests.held_service import held
from tests.service.api.raw_http import post
from tests.serving import PATIENCE_S, connect, held_process, metrics, url_of, values_of

pytestmark = pytest.mark.slow  # starts processes


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; the service runs no batch while it exists."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def url(artifact: Artifact, hold: Path) -> Iterator[str]:
    settings = {"VITRINE_BATCH__MAX_QUEUE_TOKENS": "5000", "VITRINE_DEBUG__ENABLED": "true"}
    with held_process(artifact, hold, **settings) as started:
        yield url_of(started)


def outcomes(url: str) -> dict[str, float]:
    return {
        match[1]: value
        for name, value in metrics(url).items()
        if (match := re.fullmatch(r'vitrine_inputs_total\{outcome="(\w+)"\}', name))
    }


def test_every_received_input_has_one_outcome(url: str, hold: Path) -> None:
    def encode(count: int, tokens: int, timeout_ms: int | None = None) -> int:
        inputs = [[1000 + i % 20_000] * tokens for i in range(count)]
        headers = {} if timeout_ms is None else {"X-Request-Timeout-Ms": str(timeout_ms)}
        response = httpx2.post(
            f"{url}/encode", json={"inputs": inputs}, headers=headers, timeout=240
        )
        return response.status_code

    # Measures the throughput: 0.1 ms per token, so that 800 tokens do not fit into 1 ms below.
    assert encode(5, 3) == 200
    body = {"inputs": ["a", ""]}
    assert httpx2.post(f"{url}/encode", json=body, timeout=PATIENCE_S).status_code == 422
    with ThreadPoolExecutor(2) as clients:
        with held(hold):
            small = clients.submit(encode, 16, 250)
            eventually(lambda: metrics(url)["vitrine_queue_tokens"])
            assert encode(8, 100, timeout_ms=1) == 429
            with connect(url) as leaving:
                leaving.sendall(post(body=b'{"inputs": [[1000, 1001], [1002]]}'))
            eventually(lambda: outcomes(url)["cancelled"] == 2)
        assert small.result() == 200
        with held(hold):
            # More tokens than the queue may have, which an empty queue accepts.
            large = clients.submit(encode, 100, 250)
            eventually(lambda: metrics(url)["vitrine_queue_tokens"] >= 5_000)
            assert encode(7, 3) == 429
            assert metrics(url)["vitrine_oldest_queued_request_age_seconds"] >= 0
        assert large.result() == 200
        with held(hold):
            assert encode(8, 250, timeout_ms=1) == 504
    expected = {"done": 5 + 16 + 100, "refused": 2 + 8 + 7, "late": 8, "cancelled": 2, "failed": 0}
    assert outcomes(url) == expected
    values = metrics(url)
    assert values["vitrine_inputs_received_total"] == sum(expected.values())
    for status, count in (("504", 0), ("client_deadline", 1)):
        name = f'vitrine_requests_total{{route="/encode",status="{status}"}}'
        assert values.get(name, 0) == count
    assert values["vitrine_queue_tokens"] == 0
    assert values["vitrine_oldest_queued_request_age_seconds"] == 0


def test_other_script_and_longer_texts_move_the_metrics_of_inputs(
    url: str, artifact: Artifact
) -> None:
    names = [
        *("input_tokens_count", "input_tokens_sum"),
        *("unknown_tokens_total", "truncated_inputs_total"),
    ]
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    tokenizer.no_padding()
    limit = artifact.manifest.max_tokens

    def moved(texts: list[str]) -> list[float]:
        before = metrics(url)
        body = {"inputs": texts, "on_overflow": "truncate"}
        assert httpx2.post(f"{url}/encode", json=body, timeout=PATIENCE_S).status_code == 200
        after = metrics(url)
        return [after[f"vitrine_{name}"] - before[f"vitrine_{name}"] for name in names]

    def expected(texts: list[str]) -> list[float]:
        tokenizer.no_truncation()
        is_long = [len(encoding.ids) > limit for encoding in tokenizer.encode_batch(texts)]
        tokenizer.enable_truncation(limit)
        tokens = [token for each in tokenizer.encode_batch(texts) for token in each.tokens]
        return [len(texts), len(tokens), tokens.count("[UNK]"), sum(is_long)]

    english = ["The cat sat on the mat.", "Where did the cat sit?"]
    amharic = ["\u12f5\u1218\u1275 \u1270\u1240\u1218\u1320", *["\u12f5\u1218\u1275 a " * 6] * 9]
    long = ["rain and sun " * 400, "rain"]
    usual = moved(english)
    assert usual == expected(english)
    assert usual[2:] == [0, 0]
    foreign = moved(amharic)  # more than are tokenised in the event loop
    assert foreign == expected(amharic)
    assert foreign[2] > 0.25 * foreign[1]
    assert moved(long) == expected(long)
    assert expected(long)[3] == 1


def test_computed_vectors_are_recorded_by_norm_and_distance_from_the_calibration(
    calibrated_client: TestClient, calibrated_artifact: Artifact, client: TestClient
) -> None:
    names = [
        *("vectors_total", "vector_norms_total"),
        *("compared_vectors_total", "mean_vector_distances_total"),
    ]

    def recorded() -> list[float]:
        values = values_of(calibrated_client.get("/metrics").text)
        return [values[f"vitrine_{name}"] for name in names]

    texts = ["The cat sat on the mat.", "rain", "Where did the cat sit, and when?"]
    before = recorded()
    body = {"inputs": texts, "normalize": True}
    assert calibrated_client.post("/encode", json=body).status_code == 200
    model = SentenceTransformer(str(calibrated_artifact.path.with_name("model")), device="cpu")
    pooled = model[1](model[0](model.preprocess(texts)))  # before the module Normalize
    vectors = pooled["sentence_embedding"].double().numpy(force=True)
    norms = np.linalg.norm(vectors, axis=1)
    calibration = read_calibration(calibrated_artifact)
    assert calibration is not None
    cosines = vectors @ calibration.mean / norms / np.linalg.norm(calibration.mean)
    expected = [3, norms.sum(), 3, (1 - cosines).sum()]
    assert np.subtract(recorded(), before) == pytest.approx(expected, abs=1e-4)
    assert client.post("/encode", json=body).status_code == 200
    values = values_of(client.get("/metrics").text)  # not calibrated
    assert values["vitrine_vectors_total"] >= 3
    assert values["vitrine_compared_vectors_total"] == 0


@pytest.mark.parametrize(("longest_s", "last"), [(120.0, "120.0"), (7.5, "7.5"), (900.0, "900.0")])
def test_last_bucket_of_duration_histograms_is_the_longest_deadline(
    longest_s: float, last: str
) -> None:
    metrics = Metrics(longest_s)
    ModelMetrics(metrics.inference, "a model")
    exposed = metrics.exposition()[0].decode()
    bounds = re.findall(r'vitrine_batch_seconds_bucket\{le="([^"]+)",', exposed)
    assert bounds[-2:] == [last, "+Inf"]


def test_counters_of_all_job_kinds_exist_before_the_first_job(url: str) -> None:
    counters = metrics(url)
    for kind in JOB_KINDS:
        assert f'vitrine_debug_jobs_total{{kind="{kind}",outcome="failed"}}' in counters


def test_gradient_jobs_are_counted_by_outcome(url: str) -> None:
    body = {"text": "a cat", "target": {"type": "norm"}, "method": "saliency"}
    assert httpx2.post(f"{url}/debug/attribute", json=body, timeout=240).status_code == 200
    body["layer"] = "nowhere"
    assert httpx2.post(f"{url}/debug/attribute", json=body, timeout=240).status_code == 422
    counters = metrics(url)
    for outcome in ("done", "refused"):
        assert counters[f'vitrine_debug_jobs_total{{kind="attribute",outcome="{outcome}"}}'] == 1
