"""The load test: measurements in virtual time, and one run against the service itself."""

import asyncio
import itertools
import json
import math
import multiprocessing
import random
import selectors
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deploy import load_test
from models.artifact import Artifact
from tests.serving import lines_until, process

pytestmark = pytest.mark.slow  # starts processes

WARM_UP_S = 0.5


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is scheduled: the loop would wait forever"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


class StubServer:
    """Server that responds after a delay, and pauses once.

    Attributes:
        delays: Delays of the responses in turn, in seconds.
        statuses: Statuses of the responses in turn.
        pause: Begin and duration of the pause, in seconds from the end of the warm-up.
        changes: Whether the vector differs from response to response.
        forgets: Whether the responses to the requests of the run have no vector.
    """

    def __init__(
        self,
        delays: Sequence[float] = (0.001,),
        statuses: Sequence[int] = (200,),
        pause: tuple[float, float] = (0.0, 0.0),
        *,
        changes: bool = False,
        forgets: bool = False,
    ) -> None:
        self._delays = itertools.cycle(delays)
        self._statuses = itertools.cycle(statuses)
        self._pause = pause
        self._changes = changes
        self._forgets = forgets
        self._components = random.Random(0)  # noqa: S311
        self.begin_s = math.inf

    async def __call__(self, _request: httpx.Request) -> httpx.Response:
        pause_begin_s, duration_s = self._pause
        since_s = asyncio.get_running_loop().time() - self.begin_s - pause_begin_s
        await asyncio.sleep((duration_s - since_s) if 0 <= since_s < duration_s else 0)
        await asyncio.sleep(next(self._delays))
        vector = [1.0, self._components.random() if self._changes else 2.0]
        vectors = [] if self._forgets and self.begin_s < math.inf else [vector]
        return httpx.Response(next(self._statuses), json={"embeddings": vectors})


def simulate(
    monkeypatch: pytest.MonkeyPatch, stub: StubServer, *, generator_pause_s: float = 0.0
) -> None:
    """Let the load test run in one process and in virtual time, against the stub."""

    async def run(
        plan: load_test.LoadPlan, expected: Sequence[Sequence[float]], loop: VirtualTimeLoop
    ) -> load_test.Measurements:
        stub.begin_s = loop.time() + plan.warm_up
        return await load_test.Generator(plan, stub.begin_s, expected, (0, 1)).run()

    def run_simulated(
        plan: load_test.LoadPlan, expected: Sequence[Sequence[float]], _processes: int
    ) -> load_test.Measurements:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualTimeLoop)
            clock = SimpleNamespace(monotonic=loop.time, process_time=lambda: 0.0)
            texts = _texts_with_pause(load_test.texts_of(plan.words, 0), loop, generator_pause_s)
            with monkeypatch.context() as patch:
                patch.setattr(load_test, "time", clock)
                patch.setattr(load_test, "texts_of", lambda *_: texts)
                return runner.run(run(plan, expected, loop))

    monkeypatch.setattr(load_test, "client_of", _client_of(stub))
    monkeypatch.setattr(load_test, "run", run_simulated)


def _client_of(stub: StubServer) -> Callable[[load_test.LoadPlan], httpx.AsyncClient]:
    return lambda plan: httpx.AsyncClient(
        base_url=plan.target.url, transport=httpx.MockTransport(stub)
    )


def _texts_with_pause(texts: Iterator[str], loop: VirtualTimeLoop, pause_s: float) -> Iterator[str]:
    """Yield the texts; the 400th takes `pause_s` to make, in which nothing else runs."""
    for number, text in enumerate(texts):
        if number == 400:
            loop.now += pause_s
        yield text


def load_of(out: Path, *options: str) -> tuple[int, Mapping[str, Any]]:
    """Return the exit status and the result of one run of the command line."""
    arguments = ["http://stub", "--warm-up", f"{WARM_UP_S}", "--out", str(out), *options]
    status = load_test.main(arguments)
    [result] = json.loads(out.with_suffix(".json").read_text())["results"]
    return status, result


def test_percentiles_equal_known_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, StubServer(delays=(0.05,) * 9 + (0.3,)))
    status, result = load_of(tmp_path / "a", "--rates", "100", "--seconds", "11")
    assert status == 0
    assert result["outcomes"] == {"200": pytest.approx(1100, rel=0.1)}
    assert result["latency_ms"]["p50"] == pytest.approx(50)
    assert result["latency_ms"]["p99"] == pytest.approx(300)
    assert result["latency_ms"]["p99.9"] is None  # only one of 1,100 requests lies beyond it
    assert result["late"] == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000


PAUSE_S, RUN_S = 1.5, 11.0


def test_open_loop_counts_the_wait_of_every_request_in_a_server_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, StubServer(delays=(0.005,), pause=(2.5, PAUSE_S)))
    status, result = load_of(tmp_path / "a", "--rates", "100", "--seconds", f"{RUN_S}")
    assert status == 0
    # A request that arrives t seconds before the end of the pause waits for t seconds. So a share
    # (1 - q) of the run's requests waits for longer than the pause less that share of the run.
    # The tolerance is three standard deviations of a Poisson process.
    for name, q in (("p90", 0.9), ("p99", 0.99)):
        expected_s = PAUSE_S - (1 - q) * RUN_S
        tolerance_s = 3 * math.sqrt((1 - q) * RUN_S * 100) / 100
        assert result["latency_ms"][name] / 1e3 == pytest.approx(expected_s, abs=tolerance_s)
    assert result["latency_ms"]["p50"] == pytest.approx(5)


def test_closed_loop_hides_a_server_pause_from_the_p99(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, StubServer(delays=(0.005,), pause=(2.5, PAUSE_S)))
    _, result = load_of(tmp_path / "a", "--clients", "4", "--seconds", f"{RUN_S}")
    assert result["latency_ms"]["p99"] == pytest.approx(5)
    assert result["latency_ms"]["max"] == pytest.approx(1e3 * PAUSE_S, abs=10)


def test_throughput_counts_responses_after_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, StubServer(pause=(0.0, 5.0)))
    _, result = load_of(tmp_path / "a", "--rates", "50", "--seconds", "2")
    assert result["requests"] / result["completed_per_s"] == pytest.approx(5.0, abs=0.01)


def test_pause_of_the_load_test_counts_as_latency_and_invalidates_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(monkeypatch, StubServer(), generator_pause_s=1.0)
    status, result = load_of(tmp_path / "a", "--rates", "100", "--seconds", f"{RUN_S}")
    assert status == 2
    assert result["late"] == pytest.approx(1 / RUN_S, rel=0.3)
    assert result["latency_ms"]["max"] == pytest.approx(1000, rel=0.05)
    assert result["latency_ms"]["p99"] == pytest.approx(1000 - 0.01 * 1e3 * RUN_S, rel=0.1)
    assert "INVALID" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stub", "options", "message"),
    [
        (StubServer(delays=(0.1,)), ("--p99-ms", "50"), "p99 is 100.0 ms; the limit is 50 ms"),
        (
            StubServer(statuses=(200, 200, 200, 429)),
            ("--error-rate", "0.1"),
            "requests failed; the limit is",
        ),
        (StubServer(changes=True), (), "vectors differ from those before the run"),
        (StubServer(statuses=(200, 200, 200, *[422] * 2000)), (), "no request succeeded"),
        (StubServer(forgets=True), (), "vectors differ from those before the run"),
    ],
    ids=["p99", "error rate", "vectors", "all refused", "no vectors"],
)
def test_exceeded_threshold_has_exit_status_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stub: StubServer,
    options: tuple[str, ...],
    message: str,
) -> None:
    simulate(monkeypatch, stub)
    status, _ = load_of(tmp_path / "a", "--rates", "100", "--seconds", "11", *options)
    assert status == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["fixed:7", "lognormal:12,0.5", f"file:{Path(__file__).with_name('test_locks.py')}"]
)
def test_texts_depend_on_distribution_and_seed_alone(words: str) -> None:
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


def test_each_kind_of_api_is_measured_by_two_processes(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The only run in real time. An open loop sends its whole schedule however late it is.
    monkeypatch.setattr(load_test, "LATE_S", math.inf)
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        url = lines_until(started, r"Serving .* on (http://\S+)")[1][1]
        targets = (url, f"openai={url}", f"tei={url}/tei")
        load = ("--rates", "30", "--seconds", "2", "--warm-up", "0", "--processes", "2")
        texts = ("--texts", "2", "--model", "sentence-transformers/all-MiniLM-L6-v2")
        limits = ("--error-rate", "0", "--timeout", "120", "--out", str(tmp_path / "a"))
        assert load_test.main([*targets, *load, *texts, *limits]) == 0
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert [result["target"].split()[0] for result in results] == ["vitrine", "openai", "tei"]
    # The seed fixes the schedule, and so the number of requests.
    [requests] = {result["requests"] for result in results}
    assert requests == pytest.approx(60, abs=25)
    for result in results:
        assert result["outcomes"] == {"200": requests}
        assert result["compared"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ftp://x",), "is not an http:// or https:// URL"),
        (("nope=http://x",), "unknown kind 'nope'; kinds: vitrine, openai, tei, infinity"),
        (("http://x?y=1",), "with a host and without a query"),
        (("http://x:port",), "is not a URL"),
        (("http://x", "--words", "fixed:a"), "--words: 'fixed:a' is not fixed:N, lognormal"),
        (("http://x", "--words", "fixed:0"), "--words: 'fixed:0' is not fixed:N, lognormal"),
        (("http://x", "--words", "uniform:1,2"), "--words: 'uniform:1,2' is not fixed:N"),
        (("http://x", "--words", "lognormal:0,1"), "--words: 'lognormal:0,1' is not fixed:N"),
        (("http://x", "--words", "file:/none"), "--words: /none: No such file or directory"),
        (("http://x", "--words", "file:/dev/null"), "--words: 'file:/dev/null' is not fixed:N"),
        (("http://x", "--rates", "0"), "--rates: '0' is not a number above 0"),
        (("http://x", "--rates", "5,a"), "--rates: 'a' is not a number above 0"),
        (("http://x", "--clients", "1.5"), "--clients: '1.5' is not an integer above 0"),
        (("http://x", "--seconds", "nan"), "--seconds: 'nan' is not a number above 0"),
        (("http://x", "--warm-up", "-1"), "--warm-up: '-1' is not a number of seconds"),
        (("http://x", "--texts", "0"), "--texts: '0' is not an integer above 0"),
        (("http://x", "--processes", "0"), "--processes: '0' is not an integer above 0"),
        (("http://x", "--error-rate", "5"), "--error-rate: '5' is not a number from 0 to 1"),
        (("http://x", "--key", "ключ"), "--key: the key has other characters than"),
        (("http://x", "--key", "of a file\r"), "--key: the key has other characters than"),
        (("http://x", "--out", "/none/both"), "--out: '/none/both' is not the name of a file in"),
        (("http://x", "--rates", "1", "--clients", "1"), "not allowed with argument"),
    ],
)
def test_invalid_argument_is_named_in_the_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        load_test.main(arguments)
    assert message in capsys.readouterr().err


def test_unreachable_server_ends_the_load_test_with_a_message() -> None:
    with pytest.raises(SystemExit, match=r"http://127\.0\.0\.1:9: no vector from the vitrine API"):
        load_test.main(["http://127.0.0.1:9", "--rates", "1"])


def test_refusal_is_shown_with_its_reason(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        url = lines_until(started, r"Serving .* on (http://\S+)")[1][1]
        for kind in ("vitrine", "openai"):
            with pytest.raises(SystemExit, match=f"no vector from the {kind} API: .*unknown model"):
                load_test.main([f"{kind}={url}", "--model", "another"])


def test_interrupt_leaves_the_results_of_the_runs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(monkeypatch, StubServer())
    run = load_test.run

    def run_or_interrupt(plan: load_test.LoadPlan, *arguments: object) -> load_test.Measurements:
        if plan.rate == 20:
            raise KeyboardInterrupt
        return run(plan, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(load_test, "run", run_or_interrupt)
    status, result = load_of(tmp_path / "a.json", "--rates", "10,20,30")
    assert status == 130
    assert result["offered"] == 10
    assert "interrupted, after 1 of 3 runs" in capsys.readouterr().err


class DyingProcess:
    """A process that dies before it has sent anything."""

    exitcode = -9

    def __init__(self, **_: object) -> None:
        """Take the arguments of `multiprocessing.Process`."""

    def start(self) -> None:
        """Die."""


def test_process_that_dies_leaves_the_results_of_the_runs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = load_test.run
    simulate(monkeypatch, StubServer())
    simulated = load_test.run

    def run(plan: load_test.LoadPlan, *arguments: object) -> load_test.Measurements:
        own = real if plan.rate == 20 else simulated
        return own(plan, *arguments)  # type: ignore[arg-type]

    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(context, "Process", DyingProcess)
    monkeypatch.setattr(load_test, "run", run)
    status, result = load_of(tmp_path / "a", "--rates", "10,20,30")
    assert status == 1
    assert result["offered"] == 10
    assert "a process of the load test has died, after 1 of 3 runs" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "is_known"), [(99, False), (100, True), (101, True)])
def test_quantile_is_known_with_ten_requests_beyond_it(count: int, is_known: bool) -> None:
    plan = load_test._plans(load_test._options(["http://stub", "--rates", "10"]))[0]
    measurements = load_test.Measurements([0.001 * n for n in range(1, count + 1)])
    p90 = load_test.LoadResult.of(plan, measurements).latency_ms["p90"]
    assert p90 == (pytest.approx(90 if count == 100 else 91) if is_known else None)


def test_report_does_not_have_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, StubServer())
    load_of(tmp_path / "a", "--key=a-secret", "--seconds", "1")
    report = (tmp_path / "a.json").read_text()
    assert "--key=KEY" in report
    assert "a-secret" not in report


def test_outcomes_are_told_in_words() -> None:
    assert load_test.describe({"200": 2}) == "2 succeeded"
    outcomes = {"ReadTimeout": 1, "200": 1200, "429": 3}
    told = "1,200 succeeded, 3 got status 429, 1 failed with ReadTimeout"
    assert load_test.describe(outcomes) == told
