"""The load test, against servers whose delays are known."""

import asyncio
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from deploy import load_test
from models.artifact import Artifact
from tests.serving import lines_until, process


@pytest.fixture(autouse=True)
def _a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # What else runs here may hold up some of the sends, by less than matters to delays like these.
    monkeypatch.setattr(load_test, "LATE_S", 0.1)


class Stub:
    """Answers after a delay, and not at all while it stalls.

    Attributes:
        delays: Of the answers in turn, in seconds.
        statuses: Of the answers in turn.
        stalls_at: When it stalls, in seconds from the first request, and for how long.
    """

    def __init__(
        self,
        delays: tuple[float, ...] = (0.0,),
        statuses: tuple[int, ...] = (200,),
        stalls_at: tuple[float, float] = (0.0, 0.0),
        changes: bool = False,
    ) -> None:
        self._delays = itertools.cycle(delays)
        self._statuses = itertools.cycle(statuses)
        self._stalls_at = stalls_at
        self.first: float | None = None
        self._changes = changes

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:  # noqa: ANN401
        now = time.monotonic()
        self.first = self.first or now
        begin, length = self._stalls_at
        if begin <= now - self.first < begin + length:
            await asyncio.sleep(self.first + begin + length - now)
        await asyncio.sleep(next(self._delays))
        vector = [1.0, random.random() if self._changes else 2.0]  # noqa: S311
        status = next(self._statuses)
        await send({"type": "http.response.start", "status": status, "headers": []})
        body = json.dumps({"embeddings": [vector]}).encode()
        await send({"type": "http.response.body", "body": body})


@contextmanager
def served(stub: Stub) -> Iterator[str]:
    stub.first = None
    server = uvicorn.Server(uvicorn.Config(stub, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def load_of(stub: Stub, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the result of the first run that the tool itself calls valid."""
    for _ in range(5):  # what else a machine does may hold up the sends of one
        with served(stub) as url:
            arguments = [url, "--warm-up", "0.5", "--processes", "1", "--out", str(out), *options]
            status = load_test.main(arguments)
        if status != 2:
            break
    [result] = json.loads(out.with_suffix(".json").read_text())["results"]
    return status, result


def test_percentiles_are_those_of_known_delays(tmp_path: Path) -> None:
    stub = Stub(delays=(0.05,) * 9 + (0.3,))
    status, result = load_of(stub, tmp_path / "a", "--rates", "100", "--seconds", "11")
    assert status == 0
    assert result["outcomes"] == {"200": pytest.approx(1100, rel=0.1)}
    assert 50 <= result["latency_ms"]["p50"] < 100
    assert 300 <= result["latency_ms"]["p99"] < 400
    assert result["latency_ms"]["p99.9"] is None  # of 1,100, one lies beyond it
    assert (tmp_path / "a.png").stat().st_size > 10_000


STALL_S, RUN_S = 1.5, 11.0


def test_a_stall_shows_as_computed(tmp_path: Path) -> None:
    # Of those who come while it lasts, each waits for what is left of it: a share q of all waits
    # for less than what is left after all but (1 - q) of the run.
    stub = Stub(stalls_at=(2.5, STALL_S))
    # So many had come by then, give or take what a Poisson process does: three deviations.
    computed_s = {
        name: pytest.approx(
            STALL_S - (1 - q) * RUN_S, abs=3 * math.sqrt((1 - q) * RUN_S * 100) / 100
        )
        for name, q in (("p90", 0.9), ("p99", 0.99))
    }
    for _ in range(5):  # what else a machine does may hold up the 150 answers after one stall
        status, result = load_of(stub, tmp_path / "a", "--rates", "100", "--seconds", f"{RUN_S}")
        assert status == 0
        found_s = {name: result["latency_ms"][name] / 1e3 for name in computed_s}
        if found_s == computed_s:
            break
    assert found_s == computed_s
    assert result["latency_ms"]["p50"] < 100


def test_a_server_that_falls_behind_is_not_said_to_keep_up(tmp_path: Path) -> None:
    # The first request comes before the warm-up, half a second or more before the run of 2 s.
    stub = Stub(stalls_at=(1.0, 5.0))
    _, result = load_of(stub, tmp_path / "a", "--rates", "50", "--seconds", "2")
    assert 4.0 < result["requests"] / result["completed_per_s"] < 5.7


def test_clients_that_wait_hide_it(tmp_path: Path) -> None:
    stub = Stub(delays=(0.005,), stalls_at=(2.5, STALL_S))
    _, result = load_of(stub, tmp_path / "a", "--clients", "4", "--seconds", f"{RUN_S}")
    assert result["latency_ms"]["p99"] < 300
    assert result["latency_ms"]["max"] > 900 * STALL_S


@pytest.mark.parametrize(
    ("stub", "options", "message"),
    [
        (Stub(delays=(0.1,)), ("--p99-ms", "50"), "p99 is "),
        (Stub(statuses=(200, 200, 200, 429)), ("--error-rate", "0.1"), "requests failed, above"),
        (Stub(changes=True), (), "known vectors differ"),
    ],
)
def test_a_threshold_that_is_broken_is_status_1(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stub: Stub,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(load_test, "LATE_S", 1.0)  # status 2 comes before 1
    status, _ = load_of(stub, tmp_path / "a", "--rates", "100", "--seconds", "3", *options)
    assert status == 1
    assert message in capsys.readouterr().err


def test_a_run_that_sends_too_late_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_test, "LATE_S", 0.0)
    status, result = load_of(Stub(), tmp_path / "a", "--rates", "50", "--seconds", "1")
    assert status == 2
    assert result["late"] > load_test.MAX_LATE
    assert "INVALID" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["fixed:7", "lognormal:12,0.5", f"file:{Path(__file__).with_name('test_locks.py')}"]
)
def test_texts_are_those_of_the_distribution_and_the_seed(words: str) -> None:
    first, again, other = (
        list(itertools.islice(load_test.texts_of(words, seed), 2000)) for seed in (1, 1, 2)
    )
    assert first == again != other
    lengths = sorted(len(text.split()) for text in first)
    if words.startswith("fixed"):
        assert set(lengths) == {7}
    if words.startswith("lognormal"):
        assert 11 <= lengths[1000] <= 13
        assert lengths[0] < 6 < 30 < lengths[-1]


def test_each_kind_of_server_is_spoken_to_in_its_own_words(
    artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        url = lines_until(started, r"Serving .* on (http://\S+)")[1][1]
        targets = (url, f"openai={url}", f"tei={url}/tei")
        rest = ("--clients", "2", "--seconds", "3", "--warm-up", "0", "--texts", "2")
        model = ("--model", "sentence-transformers/all-MiniLM-L6-v2", "--error-rate", "0")
        assert load_test.main([*targets, *rest, *model]) == 0
    table = capsys.readouterr().out
    for kind in ("vitrine", "openai", "tei"):
        assert f"| {kind} http" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ftp://x",), "is no http:// address"),
        (("nope=http://x",), "'nope' is none of vitrine, openai, tei, infinity"),
        (("http://x", "--words", "fixed:a"), "argument --words"),
        (("http://x", "--rates", "0"), "argument --rates"),
        (("http://x", "--rates", "1", "--clients", "1"), "not allowed with argument"),
    ],
)
def test_a_wrong_argument_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        load_test.main(arguments)
    assert message in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(SystemExit, match=r"http://127\.0\.0\.1:9 does not have the vitrine API"):
        load_test.main(["http://127.0.0.1:9", "--rates", "1"])
