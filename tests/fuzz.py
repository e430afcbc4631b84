"""Bodies for `POST /encode` that nobody meant to send: `make fuzz`.

They are made of bytes, not of text: what breaks a parser, as half a surrogate, is no text.
"""

import itertools
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
LONGEST_S = 5.0


@dataclass(frozen=True)
class Finding:
    """A body that was not answered as it should be, and why."""

    body: bytes
    why: str


def bodies(seed: int) -> Iterator[bytes]:
    """Yield bodies without end: good ones with a few things done to them."""
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


def fuzz(client: TestClient, count: int, seed: int = 0) -> list[Finding]:
    """Post so many bodies, and return what was found."""
    findings: list[Finding] = []
    good = {"inputs": "a text"}
    wanted = client.post("/encode", json=good).json()
    for number, body in enumerate(itertools.islice(bodies(seed), count)):
        started = time.perf_counter()
        answer = client.post("/encode", content=body, headers={"Content-Type": "application/json"})
        taken = time.perf_counter() - started
        why = f"{taken:.1f} s" if taken > LONGEST_S else _wrong(answer)
        if why:
            findings.append(Finding(body, why))
        if number % 500 == 0 and client.post("/encode", json=good).json() != wanted:
            findings.append(Finding(body, "another vector for the next request"))
    return findings


def _wrong(answer: Response) -> str | None:
    if answer.status_code not in STATUSES:
        return f"status {answer.status_code}"
    try:
        told = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        return "an answer that is not JSON"
    if answer.status_code != 200:
        return f"an error of {len(answer.content)} bytes" if len(answer.content) > 1000 else None
    vectors = [np.ravel(part) for part in told["embeddings"] if not isinstance(part, str)]
    is_finite = all(np.isfinite(vector.astype(np.float64)).all() for vector in vectors)
    return None if is_finite else "a number that is none"


def main() -> int:
    """Run the command line; return 1 if something was found."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with serving(create_app(Settings(model=ModelSettings(path=ARTIFACT)))) as client:
        findings = fuzz(client, count)
    for finding in findings[:20]:
        print(f"{finding.why}: {finding.body[:300]!r}")
    print(f"{count} bodies, {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
