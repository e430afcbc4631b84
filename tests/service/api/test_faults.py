"""Concurrent requests under faults: outcomes, vectors and memory."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import open_engine
from models.packing import pack
from tests.eventually import eventually_async
from tests.faulty_service import HANGS, IS_NAN, RAISES
from tests.held_service import held
from tests.serving import PATIENCE_S, held_process, metrics, url_of

pytestmark = pytest.mark.slow  # starts processes

Rows = list[list[int]]

QUEUE_TOKENS = 1200


class Storm:
    """Concurrent clients with valid, failing, late and cancelled requests; no row is sent twice.

    Attributes:
        inputs: Number of inputs by outcome, as seen by the clients.
        vectors: Rows that were sent, and the vectors received.
    """

    def __init__(self, url: str) -> None:
        self.inputs: Counter[str] = Counter()
        self.vectors: list[tuple[list[int], NDArray[np.float32]]] = []
        self._url = url
        self._fresh = count(3000)

    async def run(self, seed: int, clients: int = 16, requests: int = 25) -> None:
        """Send random requests from concurrent clients."""
        async with self._http(clients) as http:
            await asyncio.gather(
                *(self._client(http, f"{seed} {i}", requests) for i in range(clients))
            )

    async def run_every_outcome(self, hold: Path) -> None:
        """Send requests with every outcome. That of random ones depends on their timing."""
        rng = random.Random(0)  # noqa: S311
        async with self._http(2) as http:
            for fault in (RAISES, IS_NAN, HANGS):
                rows = self._rows([5, 5], rng)
                rows[1][0] = fault
                await self._request(http, "poison", rows, guilty=1)
            with held(hold):
                await self._request(http, "hasty", self._rows([5], rng))
                await self._request(http, "leaving", self._rows([5], rng))
                await eventually_async(lambda: not metrics(self._url)["vitrine_queue_tokens"])
                rows = self._rows([50] * (2 * QUEUE_TOKENS // 50), rng)
                filling = asyncio.ensure_future(self._request(http, "plain", rows))
                await eventually_async(
                    lambda: metrics(self._url)["vitrine_queue_tokens"] >= QUEUE_TOKENS
                )
                await self._request(http, "plain", self._rows([5], rng))
            await filling

    def _http(self, clients: int) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=clients)
        return httpx2.AsyncClient(base_url=self._url, limits=limits, timeout=PATIENCE_S)

    def _rows(self, lengths: Sequence[int], rng: random.Random) -> Rows:
        return [
            [next(self._fresh) % 20_000 + 3000, *rng.choices(range(3000, 23_000), k=length - 1)]
            for length in lengths
        ]

    async def _client(self, http: httpx2.AsyncClient, seed: str, requests: int) -> None:
        rng = random.Random(seed)  # noqa: S311
        for _ in range(requests):
            kind = rng.choices(("plain", "poison", "hasty", "leaving"), (8, 1, 1, 1))[0]
            rows = self._rows(rng.choices(range(2, 61), k=rng.randint(1, 6)), rng)
            guilty = rng.randrange(len(rows))
            if kind == "poison":
                rows[guilty][0] = rng.choices((RAISES, IS_NAN, HANGS), (10, 10, 1))[0]
            await self._request(http, kind, rows, guilty)

    async def _request(
        self, http: httpx2.AsyncClient, kind: str, rows: Rows, guilty: int | None = None
    ) -> None:
        headers = {"X-Request-Timeout-Ms": "2"} if kind == "hasty" else {}
        request = http.post("/encode", json={"inputs": rows}, headers=headers)
        try:
            response = await asyncio.wait_for(request, 0.003 if kind == "leaving" else None)
        except TimeoutError:
            assert kind == "leaving"
            self.inputs["left"] += len(rows)
            return
        outcome = {200: "done", 429: "refused", 500: "failed", 504: "late"}[response.status_code]
        self.inputs[outcome] += len(rows)
        if outcome == "done":
            assert kind != "poison"
            vectors = np.array(response.json()["embeddings"], dtype=np.float32)
            self.vectors += zip(rows, vectors, strict=True)
        elif outcome == "failed":
            assert (kind, response.json()["index"]) == ("poison", guilty)
        else:
            assert outcome == "refused" or kind == "hasty"


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file; the service runs no batch while it exists."""
    return tmp_path / "hold"


@pytest.fixture
def service(small_artifact: Artifact, hold: Path) -> Iterator[tuple[str, int]]:
    with held_process(
        small_artifact,
        hold,
        VITRINE_BATCH__MAX_QUEUE_TOKENS=str(QUEUE_TOKENS),
        VITRINE_LIMITS__REQUEST_S="3600",
    ) as started:
        yield url_of(started), started.pid


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def is_settled(values: dict[str, float]) -> bool:
    """Whether every input received has an outcome."""
    outcomes = sum(value for name, value in values.items() if "vitrine_inputs_total" in name)
    is_empty = values["vitrine_queue_tokens"] == 0
    return is_empty and values["vitrine_inputs_received_total"] == outcomes


async def test_under_faults_every_input_has_one_outcome_and_its_own_vector(
    service: tuple[str, int], hold: Path, small_artifact: Artifact
) -> None:
    url, pid = service
    storm = Storm(url)
    await storm.run_every_outcome(hold)
    await storm.run(seed=0)
    await eventually_async(lambda: is_settled(metrics(url)))
    values = metrics(url)
    server = {
        outcome: values[f'vitrine_inputs_total{{outcome="{outcome}"}}']
        for outcome in ("done", "refused", "failed", "late", "cancelled")
    }
    clients = storm.inputs
    assert min(clients[kind] for kind in ("done", "refused", "failed", "late", "left")) > 0
    assert (server["failed"], server["late"]) == (clients["failed"], clients["late"])
    # A client that leaves may have been answered already, or leave before its request is read.
    for kind in ("done", "refused"):
        assert clients[kind] <= server[kind] <= clients[kind] + clients["left"]
    assert sum(server.values()) <= sum(clients.values())
    engine = open_engine(small_artifact)
    for start in range(0, len(storm.vectors), 50):
        rows, vectors = zip(*storm.vectors[start : start + 50], strict=True)
        expected = engine.run(pack(rows, [0] * len(rows)))
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(np.stack(vectors), expected, atol=2e-6)
    before = resident_mb(pid)
    for seed in (1, 2):
        await storm.run(seed)
    await eventually_async(lambda: is_settled(metrics(url)))
    assert resident_mb(pid) < 1.1 * before
    assert httpx2.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200
