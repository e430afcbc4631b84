"""Simulate a day of traffic under scaling rules: latency, 429s, scale changes and worker hours.

    python -m tests.benchmarks.scaling_simulation

Discrete events without a clock: arrivals, the end of each request, scrapes of Prometheus and syncs
of the HorizontalPodAutoscaler. A worker serves its queue in order. Each request goes to a random
worker, as from a Service with a connection per request. Deadlines and retries of clients are not
simulated. Rules are those of
https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/.
"""

import argparse
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# A worker with two CPUs of its own: 4,045 tokens per CPU second, 0.2 ms of CPU time per request.
# process_cpu_seconds_total before and after `deploy/load_test.py --words lognormal:40,0.7`, with
# `--texts 16 --clients 1` and `--texts 1 --clients 16`: all-MiniLM-L6-v2, AMD EPYC, 2026-11-28.
TOKENS_PER_S = 8090.0
REQUEST_S = 0.0001
# VITRINE_BATCH__MAX_QUEUE_TOKENS: requests beyond it get 429.
MAX_QUEUE_TOKENS = 1_000_000
# `deploy/load_test.py --texts 16 --words lognormal:40,0.7`: 52 tokens per text.
TEXTS, TOKENS_PER_TEXT, SIGMA = 16, 52.0, 0.7

DAY_S = 86_400.0
SPIKES_S = (10 * 3600.0, 15.5 * 3600.0)
SPIKE_LENGTH_S, SPIKE_FACTOR = 300.0, 5.0
SCRAPE_S = SYNC_S = 15.0
# A sync reads samples that are half a scrape interval old.
SYNC_OFFSET_S = 7.5
TOLERANCE = 0.1
STABILIZATION_S = 300.0


@dataclass(frozen=True)
class Rule:
    """Targets of one autoscaler; the largest number of replicas of all metrics is used.

    Attributes:
        targets: Target per metric: `cpu`, `queue_tokens` and `tokens_per_s` per replica,
            or `queue_age_s` of the oldest queued request of all (metric type Value).
        up_pods: Number of replicas that may be added per `up_period_s`, if 100 % is less.
        up_period_s: Period of both limits, in seconds.
        min_replicas: Minimum number of replicas.
        max_replicas: Maximum number of replicas.
    """

    targets: Mapping[str, float]
    up_pods: int = 0
    up_period_s: float = 30
    min_replicas: int = 2
    max_replicas: int = 20


RULES = {
    "CPU 70 %, queued tokens 4,000: kubernetes/base": Rule(
        {"cpu": 0.7, "queue_tokens": 4000}, 10, 15
    ),
    "the same, at most doubled every 30 s": Rule({"cpu": 0.7, "queue_tokens": 4000}),
    "queue age 0.1 s": Rule({"queue_age_s": 0.1}, 10, 15),
    "queue age 0.5 s": Rule({"queue_age_s": 0.5}, 10, 15),
    "queued tokens 1,000": Rule({"queue_tokens": 1000}, 10, 15),
    "tokens/s 4,000": Rule({"tokens_per_s": 4000}, 10, 15),
    "tokens/s 4,000, queued tokens 1,000": Rule(
        {"tokens_per_s": 4000, "queue_tokens": 1000}, 10, 15
    ),
    "tokens/s 4,000, queue age 0.5 s: kubernetes/keda": Rule(
        {"tokens_per_s": 4000, "queue_age_s": 0.5}, 10, 15
    ),
    "tokens/s 2,000, queue age 0.5 s": Rule({"tokens_per_s": 2000, "queue_age_s": 0.5}, 10, 15),
    "tokens/s 1,200, queue age 0.5 s": Rule({"tokens_per_s": 1200, "queue_age_s": 0.5}, 10, 15),
}


class Worker:
    """One replica, which serves requests in order.

    Args:
        started_s: Time from which it costs worker hours.
        ready_s: Time from which it receives requests.
    """

    def __init__(self, started_s: float, ready_s: float) -> None:
        self.started_s, self.ready_s = started_s, ready_s
        self.free_s = 0.0  # end of its last request
        self.work_s = 0.0  # of all requests, done or queued
        # End, arrival, start and tokens of its requests.
        self.pending: deque[tuple[float, float, float, float]] = deque()

    def finish(self, now: float) -> None:
        """Remove the requests that have ended by `now`."""
        while self.pending and self.pending[0][0] <= now:
            self.pending.popleft()

    def busy_s(self, now: float) -> float:
        """Return the time for which it has computed until `now`, in seconds."""
        return self.work_s - max(0.0, self.free_s - now)

    def queue(self, now: float) -> tuple[float, float]:
        """Return its queued tokens, and the age of its oldest queued request in seconds."""
        waiting = [request for request in self.pending if request[2] > now]
        tokens = sum(request[3] for request in waiting)
        return tokens, now - waiting[0][1] if waiting else 0.0


def desired_replicas(replicas: int, ready: int, name: str, metric: float, target: float) -> int:
    """Return the number of replicas that one metric recommends; arguments as in `Autoscaler`."""
    # The type Value multiplies ready replicas; the others divide the sum over all replicas.
    total = metric * ready if name == "queue_age_s" else metric
    ratio = metric / target if name == "queue_age_s" else metric / (target * replicas)
    # Without the margin, rounding errors would add a replica.
    return replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(total / target - 1e-9)


@dataclass
class Autoscaler:
    """The HorizontalPodAutoscaler's rule: tolerance, policies and stabilisation of one target."""

    rule: Rule
    recommendations: deque[tuple[float, int]] = field(default_factory=deque)
    additions: deque[tuple[float, int]] = field(default_factory=deque)

    def sync(self, now: float, replicas: int, ready: int, metrics: Mapping[str, float]) -> int:
        """Return the number of replicas from `now` on.

        Args:
            now: Time in seconds.
            replicas: Replicas now, those that start included.
            ready: Replicas that serve.
            metrics: Sum over all replicas by metric; of `queue_age_s` the maximum.
        """
        rule = self.rule
        desired = max(
            desired_replicas(replicas, ready, name, metrics[name], target)
            for name, target in rule.targets.items()
        )
        desired = min(max(desired, rule.min_replicas), rule.max_replicas)
        self.recommendations.append((now, desired))
        while self.recommendations[0][0] <= now - STABILIZATION_S:
            self.recommendations.popleft()
        if desired <= replicas:
            return min(replicas, max(count for _, count in self.recommendations))
        while self.additions and self.additions[0][0] <= now - rule.up_period_s:
            self.additions.popleft()
        before = replicas - sum(count for _, count in self.additions)
        limit = max(2 * before, before + rule.up_pods)
        desired = max(replicas, min(desired, limit))
        if desired > replicas:
            self.additions.append((now, desired - replicas))
        return desired


@dataclass
class DayOutcome:
    """Result of one simulated day: latencies in seconds, differences of replicas by change."""

    latencies: list[float] = field(default_factory=list)
    rejected: int = 0
    changes: list[int] = field(default_factory=list)
    worker_hours: float = 0.0

    @property
    def reversals(self) -> int:
        """Scale changes in the opposite direction of the one before."""
        return sum(a * b < 0 for a, b in zip(self.changes, self.changes[1:], strict=False))

    def p(self, percent: float) -> float:
        """Return a percentile of the latencies, in milliseconds."""
        return 1000 * float(np.percentile(self.latencies, percent))


def traffic(seed: int, mean_rate: float = 8.0) -> tuple[FloatArray, FloatArray]:
    """Return arrival times in seconds and tokens of the requests of a day, both of shape (R,)."""
    rng = np.random.default_rng(seed)
    second = np.arange(DAY_S)
    rate = mean_rate * (1 - 0.7 * np.cos(2 * np.pi * (second / DAY_S - 1 / 12)))  # least at 2:00
    for start in SPIKES_S:
        rate[(second >= start) & (second < start + SPIKE_LENGTH_S)] *= SPIKE_FACTOR
    counts = rng.poisson(rate)
    times = np.sort(np.repeat(second, counts) + rng.random(counts.sum()))
    mu = math.log(TOKENS_PER_TEXT) - SIGMA**2 / 2
    tokens = np.zeros(len(times))
    for _ in range(TEXTS):
        tokens += rng.lognormal(mu, SIGMA, len(times)).clip(3, 256)
    return times, tokens


class Cluster:
    """Workers behind a load balancer, with the metrics that the autoscaler reads.

    Args:
        rule: Scaling rule.
        start_s: Time from a scale-up until the new worker is ready, in seconds.
        tokens_per_s: Speed of a worker.
    """

    def __init__(self, rule: Rule, start_s: float, tokens_per_s: float) -> None:
        self.outcome = DayOutcome()
        self._start_s, self._tokens_per_s = start_s, tokens_per_s
        self._autoscaler = Autoscaler(rule)
        self._workers = [Worker(0.0, 0.0) for _ in range(rule.min_replicas)]
        self._starting: list[Worker] = []
        self._random = random.Random(0)  # noqa: S311 - a simulation
        self._next_scrape, self._next_sync = SCRAPE_S, SCRAPE_S + SYNC_OFFSET_S
        self._metrics = dict.fromkeys(("cpu", "queue_tokens", "tokens_per_s", "queue_age_s"), 0.0)
        self._tokens = 0.0
        self._scraped_tokens = deque([0.0] * 3, maxlen=3)  # a rate over 30 s
        self._scraped_busy: dict[Worker, float] = {}

    def request(self, now: float, tokens: float) -> None:
        """Queue a request at a random worker, or reject it if the queue is full."""
        self._tokens += tokens
        for worker in self._workers:
            worker.finish(now)
        worker = self._random.choice(self._workers)
        start = max(now, worker.free_s)
        if (start - now) * self._tokens_per_s + tokens > MAX_QUEUE_TOKENS:
            self.outcome.rejected += 1
            return
        service = tokens / self._tokens_per_s + REQUEST_S
        worker.free_s = start + service
        worker.work_s += service
        worker.pending.append((worker.free_s, now, start, tokens))
        self.outcome.latencies.append(worker.free_s - now)

    def advance(self, now: float) -> None:
        """Scrape, sync and start workers until `now`."""
        while (event := min(self._next_scrape, self._next_sync)) <= now:
            self._start(event)
            if event == self._next_scrape:
                self._scrape(event)
                self._next_scrape += SCRAPE_S
            else:
                self._sync(event)
                self._next_sync += SYNC_S
        self._start(now)

    def stop(self, now: float) -> None:
        """Add the worker hours of the workers that are left."""
        workers = [*self._workers, *self._starting]
        self.outcome.worker_hours += sum(now - worker.started_s for worker in workers) / 3600

    def _start(self, now: float) -> None:
        while self._starting and self._starting[0].ready_s <= now:
            self._workers.append(self._starting.pop(0))

    def _scrape(self, now: float) -> None:
        busy = {worker: worker.busy_s(now) for worker in self._workers}
        before = self._scraped_busy
        self._metrics["cpu"] = sum(busy[w] - before.get(w, 0.0) for w in busy) / SCRAPE_S
        self._scraped_busy = busy
        queues = [worker.queue(now) for worker in self._workers]
        self._metrics["queue_tokens"] = sum(tokens for tokens, _ in queues)
        self._metrics["queue_age_s"] = max(age for _, age in queues)
        self._scraped_tokens.append(self._tokens)
        rate = (self._scraped_tokens[-1] - self._scraped_tokens[0]) / (2 * SCRAPE_S)
        self._metrics["tokens_per_s"] = rate

    def _sync(self, now: float) -> None:
        ready = len(self._workers)
        replicas = ready + len(self._starting)
        change = self._autoscaler.sync(now, replicas, ready, self._metrics) - replicas
        if change:
            self.outcome.changes.append(change)
        self._starting += [Worker(now, now + self._start_s) for _ in range(change)]
        for _ in range(-change):
            # Workers that start are removed first; others complete their requests.
            worker = self._starting.pop() if self._starting else self._workers.pop()
            self.outcome.worker_hours += (max(now, worker.free_s) - worker.started_s) / 3600


def simulate(
    arrivals: Sequence[float],
    tokens: Sequence[float],
    rule: Rule,
    *,
    start_s: float = 10,
    tokens_per_s: float = TOKENS_PER_S,
) -> DayOutcome:
    """Return what happens to requests under a rule.

    Args:
        arrivals: Times of the requests in seconds, ascending.
        tokens: Tokens of each request.
        rule: Scaling rule.
        start_s: Time from a scale-up until the new worker is ready, in seconds.
        tokens_per_s: Speed of a worker.
    """
    cluster = Cluster(rule, start_s, tokens_per_s)
    for now, size in zip(arrivals, tokens, strict=True):
        cluster.advance(now)
        cluster.request(now, size)
    cluster.stop(arrivals[-1])
    return cluster.outcome


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of all rules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the traffic (default: %(default)s)"
    )
    parser.add_argument(
        "--start-s",
        type=float,
        default=10,
        help="seconds until a new pod is ready (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-s",
        type=float,
        default=TOKENS_PER_S,
        help="speed of a worker (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    times, tokens = (array.tolist() for array in traffic(options.seed))
    print("| rule | p50, ms | p99, ms | 429 | scale changes | reversals | worker hours |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, rule in RULES.items():
        outcome = simulate(
            times, tokens, rule, start_s=options.start_s, tokens_per_s=options.tokens_per_s
        )
        row = [f"{outcome.p(50):,.0f}", f"{outcome.p(99):,.0f}", f"{outcome.rejected:,}"]
        row += [str(len(outcome.changes)), str(outcome.reversals), f"{outcome.worker_hours:.1f}"]
        print(f"| {' | '.join([name, *row])} |", flush=True)


if __name__ == "__main__":
    main()
