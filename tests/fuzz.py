"""Malformed bodies for `POST /encode`: `make fuzz`.

Mutates bytes instead of text: lone surrogates, which break parsers, are not valid text.
"""

import itertools
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from httpx2 import Response
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import ModelSettings, Settings
from tests.serving import serving

ARTIFACT = Path("artifacts/all-MiniLM-L6-v2")
SEEDS = (
    b'{"inputs": "a text"}',
    b'{"inputs": ["The cat sat.", "\\u00e9 \\ud83d\\ude00"], "normalize": false}',
    b'{"inputs": [[101, 1996, 102], [101, 102]], "dimensions": 8, "encoding": "base64"}',
    b'{"inputs": ["word word"], "output": "tokens", "on_overflow": "error"}',
    b'{"inputs": "a", "prompt_name": null, "normalize": true}',
)
PIECES = (
    *(b"NaN", b"Infinity", b"1e999", b"-1", b"-0.0", b"30522", b"2147483648", b"9" * 400, b"1.5"),
    *(b"null", b"true", b"[]", b"{}", b"[[", b"]]", b"[" * 300, b'{"a":' * 300, b'"inputs":'),
    *(b"\\ud800", b"\\udfff", b"\\u0000", b"\xed\xa0\x80", b"\xff", b"\x00", b"\xef\xbb\xbf"),
    *("\u200b\u00ad".encode(), "\u0301".encode() * 50, "\u732b".encode(), b"[SEP]", b" " * 300),
    *(b"word " * 400, b'"', b"\\", b",", b":", b'"text", ', b"[1, 2], ", b', "dimensions": 385'),
)
STATUSES = (200, 400, 413, 422)
MAX_S = 5.0


@dataclass(frozen=True)
class Finding:
    """A body with a wrong response, and what is wrong with it."""

    body: bytes
    why: str


def bodies(seed: int) -> Iterator[bytes]:
    """Yield valid bodies with a few mutations, endlessly."""
    rng = random.Random(seed)  # noqa: S311
    while True:
        body = bytearray(rng.choice(SEEDS))
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(body) + 1)
            end = min(len(body), start + rng.choice((0, 0, 1, 1, 4, 16)))
            match rng.randrange(4):
                case 0:
                    body[start:end] = rng.choice(PIECES)
                case 1:
                    body[start:end] = rng.randbytes(end - start)
                case 2:
                    body[start:start] = body[start:end]
                case 3:
                    del body[start:end]
        yield bytes(body)


def fuzz(client: TestClient, count: int, seed: int = 0, max_s: float = math.inf) -> list[Finding]:
    """Post that many bodies; return those with a wrong response, or one later than `max_s`."""
    findings: list[Finding] = []
    valid = {"inputs": "a text"}
    expected = client.post("/encode", json=valid).json()
    for number, body in enumerate(itertools.islice(bodies(seed), count)):
        began = time.perf_counter()
        response = client.post(
            "/encode", content=body, headers={"Content-Type": "application/json"}
        )
        duration_s = time.perf_counter() - began
        why = f"{duration_s:.1f} s" if duration_s > max_s else _error_in(response)
        if why:
            findings.append(Finding(body, why))
        if number % 500 == 0 and client.post("/encode", json=valid).json() != expected:
            findings.append(Finding(body, "another vector for the next request"))
    return findings


def _error_in(response: Response) -> str | None:
    if response.status_code not in STATUSES:
        return f"status {response.status_code}"
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return "a response that is not JSON"
    if response.status_code != 200:
        size = len(response.content)
        return f"an error of {size} bytes" if size > 1000 else None
    vectors = [np.ravel(part) for part in body["embeddings"] if not isinstance(part, str)]
    is_finite = all(np.isfinite(vector.astype(np.float64)).all() for vector in vectors)
    return None if is_finite else "a non-finite number"


def main() -> int:
    """Run the command line; return 1 if there are findings."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with serving(create_app(Settings(model=ModelSettings(path=ARTIFACT)))) as client:
        findings = fuzz(client, count, max_s=MAX_S)
    for finding in findings[:20]:
        print(f"{finding.why}: {finding.body[:300]!r}")
    print(f"{count} bodies, {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
