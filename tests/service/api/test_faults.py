"""Whatever breaks: every input is accounted for, no vector is wrong, and memory comes back."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import open_engine
from models.packing import pack
from tests.faulty_service import HANGS, IS_NAN, RAISES
from tests.serving import lines_until, metrics, process

Rows = list[list[int]]


class Storm:
    """Clients of all kinds at once, each of whose rows is sent by nobody else.

    Attributes:
        inputs: How many had which outcome, as the clients see it.
        vectors: Rows and what they were answered.
    """

    def __init__(self, url: str) -> None:
        self.inputs: Counter[str] = Counter()
        self.vectors: list[tuple[list[int], NDArray[np.float32]]] = []
        self._url = url
        self._fresh = count(3000)

    async def run(self, seed: int, clients: int = 16, requests: int = 25) -> None:
        async with httpx2.AsyncClient(
            base_url=self._url, limits=httpx2.Limits(max_connections=clients), timeout=60
        ) as http:
            await asyncio.gather(
                *(self._client(http, f"{seed} {i}", requests) for i in range(clients))
            )

    async def _client(self, http: httpx2.AsyncClient, seed: str, requests: int) -> None:
        rng = random.Random(seed)  # noqa: S311
        for _ in range(requests):
            kind = rng.choices(("plain", "poison", "hasty", "leaving"), (8, 1, 1, 1))[0]
            rows = [
                [next(self._fresh) % 20_000 + 3000, *rng.choices(range(3000, 23_000), k=length)]
                for length in rng.choices(range(1, 60), k=rng.randint(1, 6))
            ]
            guilty = rng.randrange(len(rows))
            if kind == "poison":
                rows[guilty][0] = rng.choices((RAISES, IS_NAN, HANGS), (10, 10, 1))[0]
            await self._request(http, kind, rows, guilty)

    async def _request(self, http: httpx2.AsyncClient, kind: str, rows: Rows, guilty: int) -> None:
        headers = {"X-Request-Timeout-Ms": "2"} if kind == "hasty" else {}
        asked = http.post("/encode", json={"inputs": rows}, headers=headers)
        try:
            answer = await asyncio.wait_for(asked, 0.003 if kind == "leaving" else 60)
        except TimeoutError:
            assert kind == "leaving"
            self.inputs["left"] += len(rows)
            return
        outcome = {200: "done", 429: "refused", 500: "failed", 504: "late"}[answer.status_code]
        self.inputs[outcome] += len(rows)
        if outcome == "done":
            assert kind != "poison"
            vectors = np.array(answer.json()["embeddings"], dtype=np.float32)
            self.vectors += zip(rows, vectors, strict=True)
        elif outcome == "failed":
            assert (kind, answer.json()["index"]) == ("poison", guilty)
        else:
            assert outcome == "refused" or kind == "hasty"


@pytest.fixture(scope="module")
def service(artifact: Artifact) -> Iterator[tuple[str, int]]:
    with process(
        "-m",
        "tests.faulty_service",
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_ENGINE__TIMEOUT_S="0.3",
        VITRINE_BATCH__MAX_QUEUE_TOKENS="1200",
    ) as started:
        yield lines_until(started, r"Serving .* on (http://\S+)")[1][1], started.pid


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def settled(url: str) -> dict[str, float]:
    while True:
        found = metrics(url)
        told = sum(value for name, value in found.items() if "vitrine_inputs_total" in name)
        if found["vitrine_inputs_received_total"] == told and not found["vitrine_queue_tokens"]:
            return found
        await asyncio.sleep(0.05)


async def test_every_input_has_one_outcome_and_every_vector_is_its_own(
    service: tuple[str, int], artifact: Artifact
) -> None:
    url, pid = service
    storm = Storm(url)
    await storm.run(seed=0)
    found = await settled(url)
    server = {
        outcome: found[f'vitrine_inputs_total{{outcome="{outcome}"}}']
        for outcome in ("done", "refused", "failed", "late", "cancelled")
    }
    told = storm.inputs
    assert min(told[kind] for kind in ("done", "refused", "failed", "late", "left")) > 0
    assert (server["failed"], server["late"]) == (told["failed"], told["late"])
    # Who leaves may have been answered meanwhile, or have left before the request was read.
    for kind in ("done", "refused"):
        assert told[kind] <= server[kind] <= told[kind] + told["left"]
    assert sum(server.values()) <= sum(told.values())
    engine = open_engine(artifact)
    for start in range(0, len(storm.vectors), 50):
        rows, vectors = zip(*storm.vectors[start : start + 50], strict=True)
        wanted = engine.run(pack(rows, [0] * len(rows)))
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(np.stack(vectors), wanted, atol=2e-6)
    before = resident_mb(pid)
    for seed in (1, 2):
        await storm.run(seed)
    await settled(url)
    assert resident_mb(pid) < 1.1 * before
    assert httpx2.get(f"{url}/readyz").status_code == 200
