"""The manifests, against the API's own schemas, the service and each other."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from starlette.testclient import TestClient

from models.engines import ENGINES
from service.settings import EngineSettings, ServerSettings, table, variable
from tests.deploy.test_monitoring import ROOT

BASE, GPU, MONITOR = (ROOT / "deploy/kubernetes" / name for name in ("base", "gpu", "monitor"))
# The oldest API that has all of it, and the newest whose schemas are at hand.
VERSIONS = ("1.25", "1.37")


def manifests(folder: Path) -> dict[str, Any]:
    """The manifests that a kustomization lists, by kind."""
    files: list[str] = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {*files, "kustomization.yaml"} == {file.name for file in folder.iterdir()}
    found = [yaml.safe_load((folder / file).read_text()) for file in files]
    return {manifest["kind"]: manifest for manifest in found}


# The base has kinds of Kubernetes itself only.
OWN = manifests(BASE)
MANIFESTS = {**OWN, **manifests(MONITOR)}
POD = MANIFESTS["Deployment"]["spec"]["template"]
[CONTAINER] = POD["spec"]["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", sorted(OWN))
def test_every_manifest_is_what_the_api_takes(kind: str, version: str) -> None:
    kubernetes_validate.validate(OWN[kind], version, strict=True)


def test_a_field_that_the_api_does_not_know_would_be_seen() -> None:
    manifest = {**MANIFESTS["Service"], "spec": {**MANIFESTS["Service"]["spec"], "port": 80}}
    with pytest.raises(kubernetes_validate.ValidationError, match="port"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_whoever_has_set_the_image_for_cpus_still_has_to_set_the_one_for_gpus(
    tmp_path: Path,
) -> None:
    shutil.copytree(BASE.parent, tmp_path / "kubernetes")
    base = tmp_path / "kubernetes/base/kustomization.yaml"
    base.write_text(base.read_text().replace("newTag: latest", "newName: registry.example/cpu"))
    made = made_by_kustomize(tmp_path / "kubernetes/gpu")
    [container] = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "vitrine-gpu:latest"


def made_by_kustomize(folder: Path) -> dict[str, Any]:
    """By kind."""
    command = ["kubectl", "kustomize", str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(out.stdout)}


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_makes_of_them_what_they_are() -> None:
    made = made_by_kustomize(BASE)
    made["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] = CONTAINER["image"]
    assert made == OWN


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_with_gpus_they_are_the_same_but_for_where_they_compute() -> None:
    made = made_by_kustomize(GPU)
    for kind in made.keys() - {"ServiceMonitor"}:
        kubernetes_validate.validate(made[kind], VERSIONS[-1], strict=True)
    changed = {kind for kind in made if made[kind] != MANIFESTS[kind]}
    assert changed == {"Deployment", "HorizontalPodAutoscaler"}
    spec = made["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    differing = {name for name in container if container[name] != CONTAINER.get(name)}
    assert differing == {"image", "env", "resources"}
    assert container["image"] == "vitrine-gpu:latest"
    assert CONTAINER["env"][0] in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert [metric["type"] for metric in autoscaler(made)] == ["Resource", "Pods"]


def autoscaler(manifests: dict[str, Any]) -> list[dict[str, Any]]:
    metrics: list[dict[str, Any]] = manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
    return metrics


def test_every_variable_is_a_setting() -> None:
    settings = {variable(group, name) for group, name, _ in table()}
    assert {entry["name"] for entry in CONTAINER["env"]} <= settings
    on_gpu = yaml.safe_load((GPU / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    given = {
        entry["name"].removeprefix("VITRINE_ENGINE__").lower(): entry["value"]
        for entry in on_gpu["containers"][0]["env"]
    }
    assert EngineSettings(**given).name in ENGINES
    assert given["precision"] in ENGINES[given["name"]].precisions
    # Those that Kubernetes would make of the Service's name are none, and would stop the start.
    assert POD["spec"]["enableServiceLinks"] is False


def test_all_of_them_mean_the_same_pods() -> None:
    labels = POD["metadata"]["labels"]
    selectors = {
        "Deployment": MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"],
        "Service": MANIFESTS["Service"]["spec"]["selector"],
        "PodDisruptionBudget": MANIFESTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": MANIFESTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    }
    assert set(map(str, selectors.values())) == {str(labels)}
    for spread in POD["spec"]["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"] == labels
    wanted = MANIFESTS["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= MANIFESTS["Service"]["metadata"]["labels"].items()
    target = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == MANIFESTS["Deployment"]["metadata"]["name"]


def test_all_of_them_mean_the_same_port() -> None:
    [port] = CONTAINER["ports"]
    assert f"EXPOSE {port['containerPort']}\n" in (ROOT / "Dockerfile").read_text()
    assert port["containerPort"] == ServerSettings().port
    [outer] = MANIFESTS["Service"]["spec"]["ports"]
    [rule] = MANIFESTS["NetworkPolicy"]["spec"]["ingress"]
    [endpoint] = MANIFESTS["ServiceMonitor"]["spec"]["endpoints"]
    probes = [CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    named = [outer["targetPort"], endpoint["port"], *(probe["port"] for probe in probes)]
    assert {*named, *(entry["port"] for entry in rule["ports"]), outer["name"]} == {port["name"]}


def test_what_is_probed_and_measured_is_there(client: TestClient) -> None:
    for name in ("startup", "readiness", "liveness"):
        assert client.get(CONTAINER[f"{name}Probe"]["httpGet"]["path"]).status_code == 200
    [endpoint] = MANIFESTS["ServiceMonitor"]["spec"]["endpoints"]
    exposed = set(re.findall(r"^(\w+)", client.get(endpoint["path"]).text, re.MULTILINE))
    [_, queue] = autoscaler(MANIFESTS)
    own = queue["pods"]["metric"]["name"]
    assert own in exposed


def test_a_pod_may_take_as_long_to_end_as_the_service_does() -> None:
    server = ServerSettings()
    assert POD["spec"]["terminationGracePeriodSeconds"] > server.drain_s + server.grace_s
    # It is out of the balance before its port closes.
    probe = CONTAINER["readinessProbe"]
    out_s = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert out_s < server.drain_s


def test_a_pod_has_no_rights() -> None:
    # As the policy "restricted" of Kubernetes' own pod security standards asks.
    pod, container = POD["spec"]["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"]
    assert f"--uid {pod['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    assert pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["allowPrivilegeEscalation"] is False
    assert container["readOnlyRootFilesystem"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert MANIFESTS["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in MANIFESTS["NetworkPolicy"]["spec"]
