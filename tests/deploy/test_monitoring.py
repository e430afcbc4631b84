"""The Prometheus files pass promtool, the dashboard matches the types of Grafana's SDK."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from starlette.testclient import TestClient

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
ALERTS = sorted(Path(__file__).parent.glob("*alerts_test.yml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((ROOT / "deploy/grafana/vitrine.json").read_text())
    return dashboard


def expressions() -> dict[str, str]:
    """Return the queries of the dashboard by panel and target."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_configuration_is_valid(tmp_path: Path) -> None:
    shutil.copytree(PROMETHEUS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "key").touch()
    file = tmp_path / "prometheus.yml"
    file.write_text(file.read_text().replace("/tmp/key", str(tmp_path / "key")))  # noqa: S108
    promtool("check", "config", file)


@pytest.mark.slow
@needs_promtool
def test_alert_rules_pass_their_promtool_tests() -> None:
    promtool("test", "rules", *ALERTS)


def test_each_alert_has_a_firing_and_a_silent_promtool_test() -> None:
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    tested = [
        (case["alertname"], "exp_alerts" in case)
        for file in ALERTS
        for test in yaml.safe_load(file.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    for rule in group["rules"]:
        assert {(rule["alert"], True), (rule["alert"], False)} <= set(tested), rule["alert"]


def test_metrics_of_alerts_and_dashboard_are_exposed(calibrated_client: TestClient) -> None:
    assert calibrated_client.post("/encode", json={"inputs": "a text"}).status_code == 200
    exposed = set(re.findall(r"^(\w+)", calibrated_client.get("/metrics").text, re.MULTILINE))
    alerts = (PROMETHEUS / "alerts.yml").read_text()
    queried = set(
        re.findall(r"\b(?:vitrine|process)_\w+", alerts + " ".join(expressions().values()))
    )
    assert len(queried) > 15
    assert queried <= exposed


def test_dashboard_has_no_fields_unknown_to_grafana() -> None:
    register_default_plugins()  # the types of panels and queries
    original = dashboard()
    # The SDK drops fields that it does not know.
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(original)))
    unknown = [path for path in _leaves(original) if path not in set(_leaves(known))]
    assert unknown == []


def _leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[object, ...]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for key, inner in enumerate(value) for leaf in _leaves(inner, (*path, key))]
    return [(*path, value)]
