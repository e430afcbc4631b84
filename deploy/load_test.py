#!/usr/bin/env python3
"""Load test of embedding servers; needs httpx, and matplotlib for plots.

    load_test.py http://localhost:8000 --rates 50,100,200 --p99-ms 200
    load_test.py vitrine=http://localhost:8000 tei=http://localhost:8080 --clients 1,8,32 --out both

With `--rates`, requests form a Poisson process that does not wait for responses (open loop). With
`--clients`, each client sends its next request after the response (closed loop), which hides pauses
of the server. Latency is measured from the scheduled time of a request, so it includes stalls of
the server and of this program (Tene, "How NOT to measure latency"). A run is invalid if more than
1 % of its requests were sent more than 5 ms late.

Exit status: 2 if a run is invalid; otherwise 1 if a threshold is exceeded, no request of a run
succeeded, a vector of a sample text differs from the vector requested before the first run, or a
process of the load test has died; otherwise 0. An interrupted load test has 130, and prints the
table of the runs before.
"""

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import os
import platform
import queue
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

LATE_S = 0.005  # a request that is sent with more delay counts as late
MAX_LATE = 0.01  # largest share of late requests in a valid run
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}

# On average, one request in 20 contains a sample text, whose vector was requested before the runs.
_REQUESTS_PER_SAMPLE = 20
_SAMPLES = ("a sample of its own", "the second of the samples", "vectors should not change")
_MIN_COSINE = 0.9999  # allows for differences between float32 and half precision

_POOLS = 32
_SHOWN_CHARS = 300  # of the body of a refusal
_TLS = httpx.create_ssl_context()  # creating it takes longer than sending a request

_WORDS = (
    "the of and to in was for that on with as by at from are this have not they which one all "
    "there been their more will when some time into only could other than then first any may like "
    "our over also two after most many before through where years way well down should because "
    "people little state good make world still work life being under never same another while "
    "great come since against right used take house during without again place small water night "
    "point company school order country market number system train river street letter window"
).split()


@dataclass(frozen=True)
class ApiKind:
    """A kind of server API.

    Attributes:
        path: Path of the encode route.
        body: Function that returns the request body for texts, without the model.
        takes_model: Whether the body can name a model.
        vector: Function that returns the vector of the first text from a parsed response body.
    """

    path: str
    body: Callable[[Sequence[str]], dict[str, Any]]
    vector: Callable[[Any], Sequence[float]]
    takes_model: bool = True


KINDS = {
    "vitrine": ApiKind("/encode", lambda t: {"inputs": t}, lambda r: r["embeddings"][0]),
    "openai": ApiKind(
        "/v1/embeddings", lambda t: {"input": t}, lambda r: r["data"][0]["embedding"]
    ),
    "tei": ApiKind("/embed", lambda t: {"inputs": t}, lambda r: r[0], takes_model=False),
    "infinity": ApiKind("/embeddings", lambda t: {"input": t}, lambda r: r["data"][0]["embedding"]),
}


@dataclass(frozen=True)
class Target:
    """A server under test."""

    kind: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse `URL` or `KIND=URL`."""
        kind, _, url = text.rpartition("=") if "=" in text.partition("://")[0] else ("", "", text)
        if kind and kind not in KINDS:
            raise argparse.ArgumentTypeError(f"unknown kind {kind!r}; kinds: {', '.join(KINDS)}")
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise argparse.ArgumentTypeError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
            raise argparse.ArgumentTypeError(
                f"{url!r} is not an http:// or https:// URL with a host and without a query"
            )
        return cls(kind or "vitrine", url.rstrip("/"))


@dataclass(frozen=True)
class LoadPlan:
    """Parameters of one run.

    Attributes:
        rate: Requests per second in an open loop; None: closed loop.
        clients: Number of clients in a closed loop.
        words: Words per text: `fixed:N`, `lognormal:MEDIAN,SIGMA`, or `file:PATH` with one text per
            line.
        texts: Number of texts per request.
        seconds: Duration of the measurement after the warm-up, in seconds.
        warm_up: Duration of the warm-up before the measurement, in seconds.
        timeout: Timeout of a request, in seconds.
    """

    target: Target
    rate: float | None
    clients: int
    words: str
    texts: int
    seconds: float
    warm_up: float
    timeout: float
    model: str
    key: str | None
    seed: int

    async def post(self, client: httpx.AsyncClient, texts: Sequence[str]) -> httpx.Response:
        """Send a request for the vectors of texts."""
        kind = KINDS[self.target.kind]
        model = {"model": self.model} if self.model and kind.takes_model else {}
        return await client.post(kind.path, json=kind.body(texts) | model)


@dataclass
class Measurements:
    """Measurements of a run, from one client process or summed over all of them.

    Attributes:
        latencies: Latencies of the requests with status 200, in seconds.
        lags: Delay between the scheduled time and the sending of each request, in seconds.
        outcomes: Number of requests by HTTP status, or by class name of the error.
        compared: Number of responses to sample texts, whose vectors are known.
        different: Number of compared responses whose vector differs from the known one.
        last_s: Seconds from the end of the warm-up to the last response, which may arrive after the
            end of the measurement.
        cpu_s: CPU time of the load test itself, in seconds.
    """

    latencies: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    different: int = 0
    last_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, other: "Measurements") -> None:
        """Add the measurements of another process."""
        self.latencies += other.latencies
        self.lags += other.lags
        self.outcomes += other.outcomes
        self.compared += other.compared
        self.different += other.different
        self.last_s = max(self.last_s, other.last_s)
        self.cpu_s += other.cpu_s


def texts_of(words: str, seed: int) -> Iterator[str]:
    """Yield random texts endlessly; see `LoadPlan.words`."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    kind, _, argument = words.partition(":")
    if kind == "file":
        lines = [line for line in Path(argument).read_text("utf-8").splitlines() if line.strip()]
        while lines:
            yield draw.choice(lines)
        return
    if kind == "fixed":
        lengths = iter(lambda: int(argument), None)
    elif kind == "lognormal":
        median, sigma = map(float, argument.split(","))
        lengths = iter(lambda: max(1, round(draw.lognormvariate(math.log(median), sigma))), None)
    else:
        raise ValueError(f"unknown distribution {kind!r}")
    for length in lengths:
        yield " ".join(draw.choices(_WORDS, k=length))


class LoadTestError(Exception):
    """A run cannot be finished."""


class Generator:
    """Sends one process's share of a run.

    Args:
        plan: Parameters of the run.
        begin: Time at the end of the warm-up, on the monotonic clock, in seconds.
        expected: Known vector of each sample text.
        share: Index of this process and the number of processes.
    """

    def __init__(
        self,
        plan: LoadPlan,
        begin: float,
        expected: Sequence[Sequence[float]],
        share: tuple[int, int],
    ) -> None:
        self._plan = plan
        self._begin = begin
        self._expected = expected
        self._index, self._processes = share
        self._texts = texts_of(plan.words, plan.seed * 1000 + self._index)
        self._draw = random.Random(f"{plan.seed} {self._index}")  # noqa: S311
        self.measurements = Measurements()

    async def run(self) -> Measurements:
        """Send the requests, await every response, and return the measurements."""
        async with AsyncExitStack() as stack:
            # httpx scans all connections of a pool for each request; many small pools are faster.
            pools = [await stack.enter_async_context(client_of(self._plan)) for _ in range(_POOLS)]
            clients = itertools.cycle(pools)
            if self._plan.rate is not None:
                await self._open_loop(clients, self._plan.rate / self._processes)
            else:
                indices = range(self._index, self._plan.clients, self._processes)
                await asyncio.gather(*(self._closed_loop(next(clients)) for _ in indices))
        self.measurements.cpu_s = time.process_time()
        return self.measurements

    async def _open_loop(self, clients: Iterator[httpx.AsyncClient], rate: float) -> None:
        scheduled = self._begin - self._plan.warm_up
        async with asyncio.TaskGroup() as requests:
            while (scheduled := scheduled + self._draw.expovariate(rate)) < self._end:
                await asyncio.sleep(max(0.0, scheduled - time.monotonic()))
                requests.create_task(self._request(next(clients), scheduled))

    async def _closed_loop(self, client: httpx.AsyncClient) -> None:
        await asyncio.sleep(max(0.0, self._begin - self._plan.warm_up - time.monotonic()))
        while (now := time.monotonic()) < self._end:
            await self._request(client, now)

    @property
    def _end(self) -> float:
        return self._begin + self._plan.seconds

    async def _request(self, client: httpx.AsyncClient, scheduled: float) -> None:
        lag = time.monotonic() - scheduled
        texts = [next(self._texts) for _ in range(self._plan.texts)]
        sample = self._draw.randrange(len(_SAMPLES) * _REQUESTS_PER_SAMPLE)
        if sample < len(_SAMPLES):
            texts[0] = _SAMPLES[sample]
        try:
            response = await self._plan.post(client, texts)
            outcome = str(response.status_code)
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        now = time.monotonic()
        if scheduled < self._begin:
            return
        self.measurements.last_s = max(self.measurements.last_s, now - self._begin)
        self.measurements.outcomes[outcome] += 1
        self.measurements.lags.append(lag)
        if outcome == "200":
            self.measurements.latencies.append(now - scheduled)
            if sample < len(_SAMPLES):
                self.measurements.compared += 1
                self.measurements.different += self._differs(response, self._expected[sample])

    def _differs(self, response: httpx.Response, expected: Sequence[float]) -> bool:
        try:
            return not same(KINDS[self._plan.target.kind].vector(response.json()), expected)
        except (ValueError, LookupError, TypeError):  # the response has no vector
            return True


def same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the cosine similarity of two vectors is at least `_MIN_COSINE`."""
    if len(one) != len(other):
        return False
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product >= _MIN_COSINE * math.hypot(*one) * math.hypot(*other)


def client_of(plan: LoadPlan) -> httpx.AsyncClient:
    """Return a client with unlimited connections; a limit would delay requests."""
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=plan.target.url,
        headers=headers,
        limits=limits,
        timeout=plan.timeout,
        verify=_TLS,
    )


def _process(
    plan: LoadPlan,
    expected: Sequence[Sequence[float]],
    share: tuple[int, int],
    barrier: Any,  # noqa: ANN401 - multiprocessing has no names for these types
    messages: Any,  # noqa: ANN401
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    barrier.wait()  # until every process has imported its modules
    begin = time.monotonic() + plan.warm_up + 0.1
    generator = Generator(plan, begin, expected, share)

    async def run() -> Measurements:
        progress = asyncio.ensure_future(report())
        try:
            return await generator.run()
        finally:
            progress.cancel()

    async def report() -> None:
        while True:
            await asyncio.sleep(1)
            messages.put((share[0], dict(generator.measurements.outcomes)))

    messages.put((share[0], asyncio.run(run())))


async def sample_vectors(plan: LoadPlan) -> list[Sequence[float]]:
    """Request the vectors of the sample texts; exit with a message if a request fails."""
    vectors: list[Sequence[float]] = []
    async with client_of(plan) as client:
        for text in _SAMPLES:
            try:
                response = await plan.post(client, [text])
                response.raise_for_status()
                vectors.append(KINDS[plan.target.kind].vector(response.json()))
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                reason = str(error).partition("\n")[0]
                if isinstance(error, httpx.HTTPStatusError):
                    reason += f": {' '.join(error.response.text.split())[:_SHOWN_CHARS]}"
                sys.exit(f"{plan.target.url}: no vector from the {plan.target.kind} API: {reason}")
    return vectors


def run(plan: LoadPlan, expected: Sequence[Sequence[float]], processes: int) -> Measurements:
    """Run the plan in several processes and return the sum of their measurements.

    On a terminal, progress is printed to standard error.

    Args:
        plan: Parameters of the run.
        expected: Known vector of each sample text.
        processes: Number of processes.

    Raises:
        LoadTestError: A process has died.
    """
    shows_progress = sys.stderr.isatty()
    context = multiprocessing.get_context("spawn")
    barrier, messages = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(
            target=_process,
            args=(plan, expected, (index, processes), barrier, messages),
            daemon=True,
        )
        for index in range(processes)
    ]
    for worker in workers:
        worker.start()
    measurements, finished = Measurements(), 0
    progress = {index: Counter[str]() for index in range(processes)}
    while finished < processes:
        try:
            index, message = messages.get(timeout=1)
        except queue.Empty:
            if any(worker.exitcode for worker in workers):
                raise LoadTestError("a process of the load test has died") from None
            continue
        if isinstance(message, Measurements):
            measurements.add(message)
            finished += 1
        elif shows_progress:
            progress[index] = Counter(message)
            done = sum(progress.values(), Counter[str]())
            print(f"\r{describe(done)}   ", end="", file=sys.stderr, flush=True)
    if shows_progress:
        print(file=sys.stderr)
    for worker in workers:
        worker.join()
    return measurements


@dataclass(frozen=True)
class LoadResult:
    """Results of a run.

    Latencies are in milliseconds. A quantile is None if fewer than ten requests lie beyond it.

    Attributes:
        offered: Scheduled requests per second in an open loop; None in a closed loop.
        clients: Number of clients in a closed loop; None in an open loop.
        late: Share of requests that were sent more than `LATE_S` after their scheduled time.
    """

    target: str
    offered: float | None
    clients: int | None
    requests: int
    completed_per_s: float
    outcomes: dict[str, int]
    latency_ms: dict[str, float | None]
    late: float
    lag_p99_ms: float
    compared: int
    different: int
    generator_cpu_s: float

    @classmethod
    def of(cls, plan: LoadPlan, measurements: Measurements) -> "LoadResult":
        """Compute the results of a run from its measurements."""
        latencies, lags = sorted(measurements.latencies), sorted(measurements.lags)
        quantiles = {
            name: 1e3 * quantile(latencies, q) if _beyond(q, len(latencies)) >= 10 else None
            for name, q in QUANTILES.items()
        }
        quantiles["max"] = 1e3 * latencies[-1] if latencies else None
        sent = max(1, len(lags))
        return cls(
            target=f"{plan.target.kind} {plan.target.url}",
            offered=plan.rate,
            clients=None if plan.rate else plan.clients,
            requests=len(lags),
            completed_per_s=len(latencies) / max(plan.seconds, measurements.last_s),
            outcomes=dict(measurements.outcomes),
            latency_ms=quantiles,
            late=sum(lag > LATE_S for lag in lags) / sent,
            lag_p99_ms=1e3 * quantile(lags, 0.99) if lags else 0.0,
            compared=measurements.compared,
            different=measurements.different,
            generator_cpu_s=measurements.cpu_s,
        )

    @property
    def load(self) -> float:
        """Offered rate in requests per second, or number of clients in a closed loop."""
        return self.offered or self.clients or 0

    @property
    def is_valid(self) -> bool:
        """Whether at most the share `MAX_LATE` of the requests was sent late."""
        return self.late <= MAX_LATE

    def exceeded_thresholds(self, p99_ms: float | None, error_rate: float | None) -> list[str]:
        """Return a sentence per exceeded threshold, and about wrong or missing results."""
        exceeded: list[str] = []
        if not self.outcomes.get("200"):
            exceeded.append("no request succeeded")
        p99 = self.latency_ms["p99"]
        if p99_ms is not None and (p99 is None or p99 > p99_ms):
            shown = "unknown (too few responses)" if p99 is None else f"{p99:.1f} ms"
            exceeded.append(f"p99 is {shown}; the limit is {p99_ms:g} ms")
        errors = 1 - self.outcomes.get("200", 0) / max(1, self.requests)
        if error_rate is not None and errors > error_rate:
            exceeded.append(f"{errors:.2%} of the requests failed; the limit is {error_rate:.2%}")
        if self.different:
            exceeded.append(
                f"{self.different} of {self.compared} vectors differ from those before the run"
            )
        return exceeded


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the `q`-quantile of sorted values.

    It is the smallest value that at least a share `q` of the values do not exceed.
    """
    return ordered[len(ordered) - _beyond(q, len(ordered)) - 1]


def _beyond(q: float, count: int) -> int:
    """Return how many of `count` sorted values come after their `q`-quantile."""
    return count - max(1, math.ceil(q * count))


def describe(outcomes: Mapping[str, int]) -> str:
    """Return the outcomes of requests in words: "9 succeeded, 1 got status 429"."""

    def verb(outcome: str) -> str:
        if outcome == "200":
            return "succeeded"
        return f"got status {outcome}" if outcome.isdigit() else f"failed with {outcome}"

    return ", ".join(f"{count:,} {verb(outcome)}" for outcome, count in sorted(outcomes.items()))


def table(results: Sequence[LoadResult]) -> str:
    """Return the results as a Markdown table."""
    names = [*QUANTILES, "max"]
    lines = [
        f"| target | load | completed/s | {' | '.join(f'{name}, ms' for name in names)} "
        "| outcomes | sent late |",
        "|---|--:|--:|" + "--:|" * len(names) + "---|--:|",
    ]
    for result in results:
        load = f"{result.offered:g}/s" if result.offered else f"{result.clients} clients"
        cells = [
            "-" if (value := result.latency_ms[name]) is None else f"{value:.1f}" for name in names
        ]
        late = f"{result.late:.1%}" + ("" if result.is_valid else ": INVALID")
        lines.append(
            f"| {result.target} | {load} | {result.completed_per_s:.1f} | {' | '.join(cells)} "
            f"| {describe(result.outcomes)} | {late} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[LoadResult], file: Path) -> None:
    """Plot latency against load, one colour per target; invalid runs have hollow markers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, target in enumerate(dict.fromkeys(result.target for result in results)):
        of_target = [result for result in results if result.target == target]
        for name, style in (("p50", "--"), ("p99", "-")):
            points = [
                (result.load, latency, result.is_valid)
                for result in of_target
                if (latency := result.latency_ms[name]) is not None
            ]
            xs, ys = [point[0] for point in points], [point[1] for point in points]
            axes.plot(xs, ys, style, color=f"C{number}", label=f"{target}, {name}")
            for x, y, is_valid in points:
                fill = "full" if is_valid else "none"
                axes.plot([x], [y], "o", color=f"C{number}", fillstyle=fill)
    axes.set_xlabel("requests offered per second" if results[0].offered else "clients")
    axes.set_ylabel("latency from the scheduled time, ms")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def _checked(
    convert: Callable[[str], Any], is_valid: Callable[[Any], bool], description: str
) -> Callable[[str], Any]:
    """Return a conversion of arguments, whose error has the description of valid values."""

    def parse(text: str) -> object:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
        return value

    return parse


_positive = _checked(float, lambda number: 0 < number < math.inf, "a number above 0")
_duration = _checked(float, lambda number: 0 <= number < math.inf, "a number of seconds")
_share = _checked(float, lambda number: 0 <= number <= 1, "a number from 0 to 1")
_count = _checked(int, lambda number: number > 0, "an integer above 0")
_integer = _checked(int, lambda _: True, "an integer")


def _words(text: str) -> str:
    try:
        first = next(texts_of(text, seed=0), "")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, OverflowError):
        first = ""
    if not first:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not fixed:N, lognormal:MEDIAN,SIGMA, or file:PATH of a file with a text"
        )
    return text


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):  # the message does not show it
        raise argparse.ArgumentTypeError("the key has other characters than printable ASCII")
    return text


def _rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _clients(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _out(text: str) -> Path:
    path = Path(text.removesuffix(".json").removesuffix(".png"))
    if not path.name or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file in a writable folder")
    return path


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets",
        nargs="+",
        type=Target.parse,
        metavar="[KIND=]URL",
        help=f"server to test; KIND: {', '.join(KINDS)} (default: vitrine)",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--rates",
        type=_rates,
        help="open loop: comma-separated rates in requests/s, with one run per rate (default: 10)",
    )
    load.add_argument(
        "--clients",
        type=_clients,
        help="closed loop: comma-separated numbers of clients, with one run per number "
        "(default: open loop)",
    )
    parser.add_argument(
        "--texts", type=_count, default=1, help="texts per request (default: %(default)s)"
    )
    parser.add_argument(
        "--words",
        type=_words,
        default="lognormal:12,0.6",
        help="words per text: fixed:N, lognormal:MEDIAN,SIGMA, or file:PATH with one text per line "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=20,
        help="duration of each measurement in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--warm-up",
        type=_duration,
        default=3,
        help="duration of the warm-up before each measurement in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=30,
        help="request timeout in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=_count,
        help="number of client processes (default: one per CPU, at most 4)",
    )
    parser.add_argument(
        "--model",
        default="",
        help="model name in the requests, but to the TEI API, which takes none (default: none)",
    )
    parser.add_argument(
        "--key",
        type=_key,
        default=os.environ.get("LOAD_TEST_KEY"),
        help="API key (default: the environment variable LOAD_TEST_KEY)",
    )
    parser.add_argument(
        "--seed",
        type=_integer,
        default=0,
        help="random seed of texts and schedule (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=_out,
        help="write the results to OUT.json and a plot to OUT.png (default: to neither)",
    )
    parser.add_argument(
        "--p99-ms", type=_positive, help="maximum p99 latency in milliseconds (default: no limit)"
    )
    parser.add_argument(
        "--error-rate",
        type=_share,
        help="maximum share of failed requests, 0 to 1 (default: no limit)",
    )
    return parser.parse_args(arguments)


def _plans(options: argparse.Namespace) -> list[LoadPlan]:
    """Return the plan of each run. Targets alternate: the speed of a machine varies over time."""
    loads: list[tuple[float | None, int]] = [(rate, 0) for rate in options.rates or ()]
    loads += [(None, clients) for clients in options.clients or ()]
    return [
        LoadPlan(
            target=target,
            rate=rate,
            clients=clients,
            words=options.words,
            texts=options.texts,
            seconds=options.seconds,
            warm_up=options.warm_up,
            timeout=options.timeout,
            model=options.model,
            key=options.key,
            seed=options.seed,
        )
        for rate, clients in loads or [(10.0, 0)]
        for target in options.targets
    ]


def _write(results: Sequence[LoadResult], command: Sequence[str], out: Path) -> None:
    report = {
        "command": list(command),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version(), "httpx": httpx.__version__},
        "results": [asdict(result) for result in results],
    }
    out.with_name(f"{out.name}.json").write_text(json.dumps(report, indent=2))
    try:
        draw(results, out.with_name(f"{out.name}.png"))
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test and return the exit status."""
    options = _options(arguments)
    plans = _plans(options)
    processes = options.processes or min(4, os.cpu_count() or 1)
    results: list[LoadResult] = []
    status = 0
    try:
        targets = {plan.target: plan for plan in plans}
        expected = {target: asyncio.run(sample_vectors(plan)) for target, plan in targets.items()}
        for plan in plans:
            own = processes if plan.rate else min(processes, plan.clients)
            measurements = run(plan, expected[plan.target], own)
            results.append(LoadResult.of(plan, measurements))
    except (KeyboardInterrupt, LoadTestError) as error:
        reason = str(error) or "interrupted"
        print(f"{reason}, after {len(results)} of {len(plans)} runs", file=sys.stderr)
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    if results:
        print(table(results))
        if options.out:
            command = sys.argv if arguments is None else arguments
            if options.key:
                command = [word.replace(options.key, "KEY") for word in command]
            _write(results, command, options.out)
    for result in results:
        for sentence in result.exceeded_thresholds(options.p99_ms, options.error_rate):
            print(f"{result.target}: {sentence}", file=sys.stderr)
            status = status or 1
    if not all(result.is_valid for result in results):
        print("a run is invalid: this machine was too slow to send on schedule", file=sys.stderr)
        if status != 130:
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
