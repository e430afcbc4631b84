"""The deployment files agree with each other, with the README and with the settings."""

import re
from pathlib import Path

import yaml

from deploy.ray_serve import Arguments
from service.settings import table, variable

ROOT = Path(__file__).parents[2]
FILES = ("compose", "compose.gpu", "compose.model")
COMPOSE = "".join((ROOT / f"deploy/{name}.yaml").read_text() for name in FILES)


def test_environment_variables_of_the_images_are_settings() -> None:
    settings = {variable(group, name) for group, name, _ in table()}
    variables = set(re.findall(r"^ +(VITRINE_\w+):", COMPOSE, re.MULTILINE))
    variables |= set(re.findall(r"(VITRINE_\w+)=", (ROOT / "Dockerfile").read_text()))
    assert len(variables) >= 5
    assert variables <= settings


def names_in_table(chapter: str) -> set[str]:
    """Return the names in the first column of the chapter's table."""
    page = (ROOT / "deploy/README.md").read_text()
    lines = page.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0].splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_readme_lists_the_variables_of_the_compose_file() -> None:
    assert names_in_table("Compose") == set(re.findall(r"\$\{(\w+)", COMPOSE))


def test_readme_lists_the_alerts_of_the_rules() -> None:
    rules = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    assert names_in_table("Monitoring") == set(re.findall(r"- alert: (\w+)", rules))


def test_readme_lists_the_arguments_of_the_ray_application() -> None:
    assert names_in_table("Ray Serve") == Arguments.model_fields.keys()


def test_file_of_the_ray_application_has_arguments_and_settings() -> None:
    config = yaml.safe_load((ROOT / "deploy/ray_serve.yaml").read_text())
    [application] = config["applications"]
    assert Arguments(**application["args"])
    settings = {variable(group, name) for group, name, _ in table()}
    assert application["runtime_env"]["env_vars"].keys() <= settings


def test_monitoring_reaches_its_services_over_the_networks_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    sources = yaml.safe_load((ROOT / "deploy/grafana/datasources.yaml").read_text())["datasources"]
    [endpoint] = re.findall(
        r"OTEL_EXPORTER_OTLP_ENDPOINT=(\S+)", (ROOT / "deploy/README.md").read_text()
    )
    urls = [("grafana", source["url"]) for source in sources]
    urls += [(worker, endpoint) for worker in ("encode", "debug")]
    # Ports of the images, as their documentation names them.
    ports = {"prometheus": {9090}, "jaeger": {4318, 16686}}
    for client, url in urls:
        host, port = url.removeprefix("http://").split(":")
        assert int(port) in ports[host]
        assert {*services[client]["networks"]} & {*services[host]["networks"]}, url
    for name in ("prometheus", "grafana", "jaeger"):
        assert services[name]["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])


def test_compose_exports_the_model_that_the_workers_serve() -> None:
    files = [yaml.safe_load((ROOT / f"deploy/{name}.yaml").read_text()) for name in FILES]
    services, model = files[0]["services"], files[2]["services"]["model"]
    exported = model["environment"]
    for name, default in (("MODEL__PATH", "MODEL"), ("ENGINE__PRECISION", "PRECISION")):
        own, worker = (
            settings[f"VITRINE_{name}"].partition(":")[0]
            for settings in (exported, services["encode"]["environment"])
        )
        assert own == worker == f"${{VITRINE_{default}"
    assert model["volumes"] == ["models:/models"]
    assert services["encode"]["volumes"] == ["models:/models:ro"]
    assert (
        model.items() >= {key: services["export"][key] for key in ("cap_drop", "read_only")}.items()
    )
    for worker in ("encode", "debug"):
        after = files[2]["services"][worker]["depends_on"]["model"]["condition"]
        assert after == "service_completed_successfully"


def test_workers_export_no_traces_by_default() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    for worker in ("encode", "debug"):
        variable = services[worker]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert variable == "${OTEL_EXPORTER_OTLP_ENDPOINT:-}"


def test_exemplars_lead_to_traces() -> None:
    sources = yaml.safe_load((ROOT / "deploy/grafana/datasources.yaml").read_text())["datasources"]
    types = {source["uid"]: source["type"] for source in sources}
    [destination] = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id"
    assert types[destination["datasourceUid"]] == "jaeger"
    assert "--enable-feature=exemplar-storage" in COMPOSE
