"""The simulation of scaling agrees with queueing theory and Kubernetes' documentation."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.benchmarks.scaling_simulation import (
    REQUEST_S,
    RULES,
    STABILIZATION_S,
    TOKENS_PER_S,
    Autoscaler,
    DayOutcome,
    Rule,
    desired_replicas,
    simulate,
    traffic,
)

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
HPA, KEDA = (
    next(rule for name, rule in RULES.items() if name.endswith(f"kubernetes/{overlay}"))
    for overlay in ("base", "keda")
)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_mean_latency_of_one_worker_is_that_of_a_queue_with_constant_service(load: float) -> None:
    service = 0.1
    gaps = np.random.default_rng(0).exponential(service / load, 200_000)
    tokens = [(service - REQUEST_S) * TOKENS_PER_S] * len(gaps)
    fixed = Rule({"cpu": 1.0}, min_replicas=1, max_replicas=1)
    outcome = simulate(np.cumsum(gaps).tolist(), tokens, fixed)
    # Pollaczek-Khinchine's formula for M/D/1.
    expected = service * (1 + load / (2 * (1 - load)))
    assert np.mean(outcome.latencies) == pytest.approx(expected, rel=0.03)
    assert outcome.worker_hours == pytest.approx(gaps.sum() / 3600)


# Kubernetes' examples: an average of 200m with a target of 100m doubles the replicas, 50m halves
# them, and a ratio within the tolerance of 0.1 changes nothing.
@pytest.mark.parametrize(
    ("average", "expected"), [(0.2, 8), (0.05, 2), (0.109, 4), (0.091, 4), (0.112, 5)]
)
def test_recommendation_is_that_of_kubernetes_documentation(average: float, expected: int) -> None:
    assert desired_replicas(4, 4, "cpu", 4 * average, 0.1) == expected
    assert desired_replicas(4, 4, "queue_age_s", average, 0.1) == expected


def test_scale_up_keeps_to_the_policies() -> None:
    doubling = Autoscaler(Rule({"cpu": 0.1}, up_period_s=30))
    replicas, seen = 2, []
    for step in range(6):
        replicas = doubling.sync(15.0 * step, replicas, replicas, {"cpu": 100.0})
        seen.append(replicas)
    assert seen == [4, 4, 8, 8, 16, 16]
    assert Autoscaler(Rule({"cpu": 0.1}, 10, 15)).sync(0.0, 2, 2, {"cpu": 100.0}) == 12


def test_scale_down_waits_for_the_stabilization_window() -> None:
    autoscaler = Autoscaler(Rule({"cpu": 1.0}))
    replicas = autoscaler.sync(0.0, 4, 4, {"cpu": 8.0})
    times = np.arange(15.0, STABILIZATION_S + 30, 15)
    counts = [replicas := autoscaler.sync(t, replicas, replicas, {"cpu": 0.0}) for t in times]
    assert times[counts.index(2)] == STABILIZATION_S
    assert set(counts) == {8, 2}


def test_full_queue_rejects_requests() -> None:
    fixed = Rule({"cpu": 1.0}, min_replicas=2, max_replicas=2)
    assert simulate([0.0] * 5, [600_000.0] * 5, fixed).rejected == 3


@pytest.fixture(scope="module")
def outcomes() -> dict[str, DayOutcome]:
    times, tokens = (array.tolist() for array in traffic(seed=1))
    return {name: simulate(times, tokens, rule) for name, rule in [("hpa", HPA), ("keda", KEDA)]}


def test_rule_of_keda_keeps_the_day_below_500_ms(outcomes: dict[str, DayOutcome]) -> None:
    hpa, keda = outcomes["hpa"], outcomes["keda"]
    assert keda.p(99) <= 500
    assert keda.p(99) < hpa.p(99) <= 1000
    assert hpa.rejected == keda.rejected == 0
    assert hpa.worker_hours < keda.worker_hours <= 1.25 * hpa.worker_hours
    assert max(hpa.reversals, keda.reversals) <= 10


def test_simulated_rules_are_those_of_the_manifests() -> None:
    hpa = yaml.safe_load((KUBERNETES / "base/autoscaler.yaml").read_text())["spec"]
    cpu, queue = hpa["metrics"]
    assert HPA.targets == {
        "cpu": cpu["resource"]["target"]["averageUtilization"] / 100,
        "queue_tokens": float(queue["pods"]["target"]["averageValue"]),
    }
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (HPA.min_replicas, HPA.max_replicas)

    keda = yaml.safe_load((KUBERNETES / "keda/scaler.yaml").read_text())["spec"]
    rate, age = (trigger["metadata"]["threshold"] for trigger in keda["triggers"])
    assert KEDA.targets == {"tokens_per_s": float(rate), "queue_age_s": float(age)}
    behavior = keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (
        KEDA.min_replicas,
        KEDA.max_replicas,
    )
    for scaling, rule in ((hpa["behavior"], HPA), (behavior, KEDA)):
        percent, pods = scaling["scaleUp"]["policies"]
        assert (percent["value"], pods["value"]) == (100, rule.up_pods)
        assert percent["periodSeconds"] == pods["periodSeconds"] == rule.up_period_s
        assert scaling["scaleDown"]["stabilizationWindowSeconds"] == STABILIZATION_S
