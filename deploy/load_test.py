#!/usr/bin/env python3
"""Load test of an embedding server, against any deployment; needs httpx, and matplotlib to draw.

    load_test.py http://localhost:8000 --rates 50,100,200 --p99-ms 200
    load_test.py vitrine=http://localhost:8000 tei=http://localhost:8080 --clients 1,8,32 --out both

Requests arrive at random, at a rate that does not wait for answers (`--rates`, a Poisson process),
or each client sends the next one when it has its answer (`--clients`), which hides a server's
pauses: while one lasts, nobody asks. Latency counts from the moment at which a request was to
leave, so that neither a stall of the server nor one of this program is left out (Tene, "How NOT to
measure latency"). A run in which more than 1 % of the requests left late is marked invalid.

Exit status: 0, or 1 where a threshold is broken, or 2 where a run is invalid.
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
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

LATE_S = 0.005
MOST_LATE = 0.01
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}

# One request in so many asks for a text whose vector is known.
_SAMPLED = 20
_SAMPLES = ("a sample of its own", "the second of the samples", "vectors should not change")
_SAME = 0.9999  # the least cosine of one model's vectors in float32 and in half precision

_POOLS = 32
_TLS = httpx.create_ssl_context()  # takes longer to make than a request to send

_WORDS = (
    "the of and to in was for that on with as by at from are this have not they which one all "
    "there been their more will when some time into only could other than then first any may like "
    "our over also two after most many before through where years way well down should because "
    "people little state good make world still work life being under never same another while "
    "great come since against right used take house during without again place small water night "
    "point company school order country market number system train river street letter window"
).split()


@dataclass(frozen=True)
class Kind:
    """A server's contract.

    Attributes:
        path: Of the route that encodes.
        body: Texts and the name of a model to the body of a request.
        vector: The body of an answer to the vector of its first text.
    """

    path: str
    body: Callable[[Sequence[str], str], dict[str, Any]]
    vector: Callable[[Any], Sequence[float]]


KINDS = {
    "vitrine": Kind("/encode", lambda t, _: {"inputs": t}, lambda a: a["embeddings"][0]),
    "openai": Kind(
        "/v1/embeddings",
        lambda texts, model: {"input": texts, "model": model},
        lambda answer: answer["data"][0]["embedding"],
    ),
    "tei": Kind("/embed", lambda texts, _: {"inputs": texts}, lambda answer: answer[0]),
    "infinity": Kind(
        "/embeddings",
        lambda texts, model: {"input": texts, "model": model},
        lambda answer: answer["data"][0]["embedding"],
    ),
}


@dataclass(frozen=True)
class Target:
    """A server under test."""

    kind: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Return the target of `URL` or `KIND=URL`."""
        kind, _, url = text.rpartition("=") if "=" in text.partition("://")[0] else ("", "", text)
        if kind and kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(KINDS)}")
        if not url.startswith(("http://", "https://")):
            raise argparse.ArgumentTypeError(f"{url!r} is no http:// address")
        return cls(kind or "vitrine", url.rstrip("/"))


@dataclass(frozen=True)
class Plan:
    """One run: what is sent to whom, and when.

    Attributes:
        rate: Requests a second, or None where clients wait for their answers.
        clients: Of those that do.
        words: `fixed:N`, `lognormal:MEDIAN,SIGMA` or `file:PATH`.
        texts: Of a request.
        seconds: That count, after those of the warm-up.
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


@dataclass
class Seen:
    """What one process, or all of them, saw of a run.

    Attributes:
        latencies: Of the requests that were answered with 200, in seconds.
        lags: By how much each request left too late, in seconds.
        outcomes: Requests by status, or by the name of what went wrong.
        compared: Answers whose vector was known.
        different: Those of them that had another one.
        took: Seconds until the last answer, which may have come after the run.
        cpu: Seconds of CPU that sending took.
    """

    latencies: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    different: int = 0
    took: float = 0.0
    cpu: float = 0.0

    def add(self, other: "Seen") -> None:
        """Take in what another process saw."""
        self.latencies += other.latencies
        self.lags += other.lags
        self.outcomes += other.outcomes
        self.compared += other.compared
        self.different += other.different
        self.took = max(self.took, other.took)
        self.cpu += other.cpu


def texts_of(words: str, seed: int) -> Iterator[str]:
    """Give texts without end, nearly all of them different."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    kind, _, how = words.partition(":")
    if kind == "file":
        lines = [line for line in Path(how).read_text("utf-8").splitlines() if line.strip()]
        while True:
            yield draw.choice(lines)
    if kind == "fixed":
        lengths = iter(lambda: int(how), None)
    else:
        median, sigma = map(float, how.split(","))
        lengths = iter(lambda: max(1, round(draw.lognormvariate(math.log(median), sigma))), None)
    for length in lengths:
        yield " ".join(draw.choices(_WORDS, k=length))


class Generator:
    """The share of a run that one process sends.

    Args:
        plan: The run.
        begin: When what counts begins, on the clock that all processes share.
        known: Vectors of the sample texts.
        share: This process's place and the number of processes.
    """

    def __init__(
        self, plan: Plan, begin: float, known: Sequence[Sequence[float]], share: tuple[int, int]
    ) -> None:
        self._plan = plan
        self._begin = begin
        self._known = known
        self._place, self._processes = share
        self._texts = texts_of(plan.words, plan.seed * 1000 + self._place)
        self._draw = random.Random(f"{plan.seed} {self._place}")  # noqa: S311
        self.seen = Seen()

    async def run(self) -> Seen:
        """Send, wait for every answer, and return what was seen."""
        async with AsyncExitStack() as stack:
            # A pool looks through all its connections at each request, so there are many pools.
            pools = [await stack.enter_async_context(client_of(self._plan)) for _ in range(_POOLS)]
            clients = itertools.cycle(pools)
            if self._plan.rate is not None:
                await self._open_loop(clients, self._plan.rate / self._processes)
            else:
                mine = range(self._place, self._plan.clients, self._processes)
                await asyncio.gather(*(self._closed_loop(next(clients)) for _ in mine))
        self.seen.cpu = time.process_time()
        return self.seen

    async def _open_loop(self, clients: Iterator[httpx.AsyncClient], rate: float) -> None:
        leaves = self._begin - self._plan.warm_up
        async with asyncio.TaskGroup() as requests:
            while (leaves := leaves + self._draw.expovariate(rate)) < self._end:
                await asyncio.sleep(max(0.0, leaves - time.monotonic()))
                requests.create_task(self._request(next(clients), leaves))

    async def _closed_loop(self, client: httpx.AsyncClient) -> None:
        await asyncio.sleep(max(0.0, self._begin - self._plan.warm_up - time.monotonic()))
        while (now := time.monotonic()) < self._end:
            await self._request(client, now)

    @property
    def _end(self) -> float:
        return self._begin + self._plan.seconds

    async def _request(self, client: httpx.AsyncClient, leaves: float) -> None:
        lag = time.monotonic() - leaves
        kind = KINDS[self._plan.target.kind]
        texts = [next(self._texts) for _ in range(self._plan.texts)]
        sample = self._draw.randrange(len(_SAMPLES) * _SAMPLED)
        if sample < len(_SAMPLES):
            texts[0] = _SAMPLES[sample]
        try:
            answer = await client.post(kind.path, json=kind.body(texts, self._plan.model))
            outcome = str(answer.status_code)
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        now = time.monotonic()
        if leaves < self._begin:
            return
        self.seen.took = max(self.seen.took, now - self._begin)
        self.seen.outcomes[outcome] += 1
        self.seen.lags.append(lag)
        if outcome == "200":
            self.seen.latencies.append(now - leaves)
            if sample < len(_SAMPLES):
                self.seen.compared += 1
                self.seen.different += not same(kind.vector(answer.json()), self._known[sample])


def same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two vectors point the same way."""
    if len(one) != len(other):
        return False
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product >= _SAME * math.hypot(*one) * math.hypot(*other)


def client_of(plan: Plan) -> httpx.AsyncClient:
    """Return a client without a bound on connections, which would hold requests back."""
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
    plan: Plan,
    known: Sequence[Sequence[float]],
    share: tuple[int, int],
    begun: Any,  # noqa: ANN401 - multiprocessing leaves its own types unnamed
    told: Any,  # noqa: ANN401
) -> None:
    begun.wait()  # until every process has imported what it needs
    begin = time.monotonic() + plan.warm_up + 0.1
    generator = Generator(plan, begin, known, share)

    async def run() -> Seen:
        progress = asyncio.ensure_future(tell())
        try:
            return await generator.run()
        finally:
            progress.cancel()

    async def tell() -> None:
        while True:
            await asyncio.sleep(1)
            told.put((share[0], dict(generator.seen.outcomes)))

    told.put((share[0], asyncio.run(run())))


async def known_vectors(plan: Plan) -> list[Sequence[float]]:
    """Return the target's own vectors of the sample texts; where it gives none, end with why."""
    kind = KINDS[plan.target.kind]
    vectors: list[Sequence[float]] = []
    async with client_of(plan) as client:
        for text in _SAMPLES:
            try:
                answer = await client.post(kind.path, json=kind.body([text], plan.model))
                answer.raise_for_status()
                vectors.append(kind.vector(answer.json()))
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                said = str(error).partition("\n")[0]
                sys.exit(f"{plan.target.url} does not answer as {plan.target.kind}: {said}")
    return vectors


def run(plan: Plan, processes: int) -> Seen:
    """Return what all processes saw of a run; progress goes to standard error."""
    known = asyncio.run(known_vectors(plan))
    context = multiprocessing.get_context("spawn")
    begun, told = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(
            target=_process, args=(plan, known, (place, processes), begun, told), daemon=True
        )
        for place in range(processes)
    ]
    for worker in workers:
        worker.start()
    seen, finished, progress = Seen(), 0, {place: Counter[str]() for place in range(processes)}
    while finished < processes:
        try:
            place, news = told.get(timeout=plan.seconds + plan.warm_up + plan.timeout + 60)
        except queue.Empty:
            sys.exit("a process of this program does not come back")
        if isinstance(news, Seen):
            seen.add(news)
            finished += 1
        else:
            progress[place] = Counter(news)
            done = sum(progress.values(), Counter[str]())
            print(f"\r{dict(done)}   ", end="", file=sys.stderr, flush=True)
    print("\r", end="", file=sys.stderr)
    for worker in workers:
        worker.join()
    return seen


@dataclass(frozen=True)
class Result:
    """The figures of a run; times in milliseconds.

    A quantile is None where fewer than ten requests lie beyond it.
    """

    target: str
    offered: float | None
    clients: int | None
    requests: int
    answered_per_s: float
    outcomes: dict[str, int]
    latency_ms: dict[str, float | None]
    late: float
    lag_p99_ms: float
    compared: int
    different: int
    generator_cpu_s: float

    @classmethod
    def of(cls, plan: Plan, seen: Seen) -> "Result":
        """Return the figures of what was seen."""
        latencies, lags = sorted(seen.latencies), sorted(seen.lags)
        figures = {
            name: 1e3 * quantile(latencies, q) if len(latencies) * (1 - q) >= 10 else None
            for name, q in QUANTILES.items()
        }
        figures["max"] = 1e3 * latencies[-1] if latencies else None
        sent = max(1, len(lags))
        return cls(
            target=f"{plan.target.kind} {plan.target.url}",
            offered=plan.rate,
            clients=None if plan.rate else plan.clients,
            requests=len(lags),
            answered_per_s=len(latencies) / max(plan.seconds, seen.took),
            outcomes=dict(seen.outcomes),
            latency_ms=figures,
            late=sum(lag > LATE_S for lag in lags) / sent,
            lag_p99_ms=1e3 * quantile(lags, 0.99) if lags else 0.0,
            compared=seen.compared,
            different=seen.different,
            generator_cpu_s=seen.cpu,
        )

    @property
    def load(self) -> float:
        """Requests offered a second, or clients."""
        return self.offered or self.clients or 0

    @property
    def is_valid(self) -> bool:
        """Whether the requests left when they were to."""
        return self.late <= MOST_LATE

    def broken(self, p99_ms: float | None, error_rate: float | None) -> list[str]:
        """Return the thresholds that it does not hold, in words."""
        found: list[str] = []
        p99 = self.latency_ms["p99"]
        if p99_ms is not None and (p99 is None or p99 > p99_ms):
            shown = "not known: too few answers" if p99 is None else f"{p99:.1f} ms"
            found.append(f"p99 is {shown}, above {p99_ms:g} ms")
        errors = 1 - self.outcomes.get("200", 0) / max(1, self.requests)
        if error_rate is not None and errors > error_rate:
            found.append(f"{errors:.2%} of the requests failed, above {error_rate:.2%}")
        if self.different:
            found.append(f"{self.different} of {self.compared} known vectors were others")
        return found


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the smallest value that a share `q` of the values does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def table(results: Sequence[Result]) -> str:
    """Return the results in Markdown."""
    names = [*QUANTILES, "max"]
    lines = [
        f"| target | load | answered/s | {' | '.join(f'{name}, ms' for name in names)} "
        "| outcomes | left late |",
        "|---|--:|--:|" + "--:|" * len(names) + "---|--:|",
    ]
    for result in results:
        load = f"{result.offered:g}/s" if result.offered else f"{result.clients} clients"
        cells = [
            "-" if (value := result.latency_ms[name]) is None else f"{value:.1f}" for name in names
        ]
        outcomes = ", ".join(f"{name}: {count}" for name, count in sorted(result.outcomes.items()))
        late = f"{result.late:.1%}" + ("" if result.is_valid else ": INVALID")
        lines.append(
            f"| {result.target} | {load} | {result.answered_per_s:.1f} | {' | '.join(cells)} "
            f"| {outcomes} | {late} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], file: Path) -> None:
    """Draw latency against load, a target each colour; invalid runs are hollow."""
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
    axes.set_ylabel("latency from the intended start, ms")
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


def _numbers(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if min(found) <= 0:
        raise ValueError
    return found


def _words(text: str) -> str:
    next(texts_of(text, seed=0))
    return text


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets",
        nargs="+",
        type=Target.parse,
        metavar="[KIND=]URL",
        help=f"what to test; a kind is one of {', '.join(KINDS)}",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rates", type=_numbers, help="requests a second, one run each: 50,100,200")
    load.add_argument("--clients", type=_numbers, help="clients that wait, one run each: 1,8,32")
    parser.add_argument("--texts", type=int, default=1, help="of a request")
    parser.add_argument(
        "--words",
        type=_words,
        default="lognormal:12,0.6",
        help="of a text: fixed:N, lognormal:MEDIAN,SIGMA, or file:PATH with a text a line",
    )
    parser.add_argument("--seconds", type=float, default=20, help="of a run")
    parser.add_argument("--warm-up", type=float, default=3, help="seconds that do not count")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for an answer")
    parser.add_argument("--processes", type=int, default=0, help="that send; 0: as it fits")
    parser.add_argument("--model", default="", help="name that is sent to those that ask for one")
    parser.add_argument("--key", default=os.environ.get("LOAD_TEST_KEY"), help="or LOAD_TEST_KEY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.png")
    parser.add_argument("--p99-ms", type=float, help="threshold")
    parser.add_argument("--error-rate", type=float, help="threshold, from 0 to 1")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    options = _options(arguments)
    loads: list[tuple[float | None, int]] = [(rate, 0) for rate in options.rates or ()]
    loads += [(None, round(clients)) for clients in options.clients or ()]
    processes = options.processes or min(4, os.cpu_count() or 1)
    results: list[Result] = []
    for rate, clients in loads or [(10.0, 0)]:
        for target in options.targets:  # in turns, for a machine is not the same all day
            plan = Plan(
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
            seen = run(plan, processes if rate else min(processes, clients))
            results.append(Result.of(plan, seen))
    print(table(results))
    if options.out:
        report = {
            "command": sys.argv if arguments is None else list(arguments),
            "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
            "versions": {"python": platform.python_version(), "httpx": httpx.__version__},
            "results": [asdict(result) for result in results],
        }
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=2))
        try:
            draw(results, options.out.with_suffix(".png"))
        except ImportError:
            print("no picture: matplotlib is not installed", file=sys.stderr)
    status = 0
    for result in results:
        for broken in result.broken(options.p99_ms, options.error_rate):
            print(f"{result.target}: {broken}", file=sys.stderr)
            status = 1
    if not all(result.is_valid for result in results):
        print("a run is invalid: this machine could not send in time", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
