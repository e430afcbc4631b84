"""The manifests match the schemas of the Kubernetes API, the service and each other."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from models.engines import ENGINES
from service.settings import EngineSettings, ServerSettings, table, variable
from tests.deploy.test_monitoring import ROOT

KUBERNETES = ROOT / "deploy/kubernetes"
BASE, GPU, MONITOR, MODEL, KEDA = (
    KUBERNETES / name for name in ("base", "gpu", "monitor", "model", "keda")
)
# The newest in kubernetes_validate.
NEWEST = ("1.35", "1.36", "1.37")
# With the oldest API that has every field of the base.
VERSIONS = ("1.25", *NEWEST)
# Definitions of KEDA and of the Prometheus operator, which the API does not have.
CUSTOM = {"ScaledObject", "ServiceMonitor"}
OVERLAYS = sorted(folder.name for folder in KUBERNETES.iterdir() if folder != MONITOR)


def manifests(folder: Path) -> dict[str, Any]:
    """Return the manifests of a kustomization by kind."""
    files: list[str] = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {*files, "kustomization.yaml"} == {file.name for file in folder.iterdir()}
    listed = [yaml.safe_load((folder / file).read_text()) for file in files]
    return {manifest["kind"]: manifest for manifest in listed}


def validate(manifest: Any, version: str) -> None:  # noqa: ANN401
    """Raise kubernetes_validate.ValidationError if a version of the API refuses the manifest."""
    from kubernetes_validate import validate  # imports for seconds

    validate(manifest, version, strict=True)


# The base needs no custom resource definitions.
OWN = manifests(BASE)
MANIFESTS = {**OWN, **manifests(MONITOR)}
POD = MANIFESTS["Deployment"]["spec"]["template"]
[CONTAINER] = POD["spec"]["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", sorted(OWN))
def test_manifest_is_valid_for_the_kubernetes_api(kind: str, version: str) -> None:
    validate(OWN[kind], version)


def test_manifest_validation_rejects_unknown_fields() -> None:
    from kubernetes_validate import ValidationError

    manifest = {**MANIFESTS["Service"], "spec": {**MANIFESTS["Service"]["spec"], "port": 80}}
    with pytest.raises(ValidationError, match="port"):
        validate(manifest, VERSIONS[-1])


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_image_override_of_the_base_does_not_apply_to_the_gpu_overlay(
    tmp_path: Path,
) -> None:
    shutil.copytree(BASE.parent, tmp_path / "kubernetes")
    base = tmp_path / "kubernetes/base/kustomization.yaml"
    base.write_text(base.read_text().replace("newTag: latest", "newName: registry.example/cpu"))
    built = build(tmp_path / "kubernetes/gpu")
    [container] = built["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "vitrine-gpu:latest"


def build(folder: Path) -> dict[str, Any]:
    """Return the manifests that kustomize builds, by kind."""
    command = ["kubectl", "kustomize", str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(out.stdout)}


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_base_unchanged() -> None:
    built = build(BASE)
    built["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] = CONTAINER["image"]
    assert built == OWN


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_gpu_overlay_changes_only_device_image_and_autoscaling() -> None:
    built = build(GPU)
    for kind in built.keys() - {"ServiceMonitor"}:
        validate(built[kind], VERSIONS[-1])
    changed = {kind for kind in built if built[kind] != MANIFESTS[kind]}
    assert changed == {"Deployment", "HorizontalPodAutoscaler"}
    spec = built["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    differing = {name for name in container if container[name] != CONTAINER.get(name)}
    assert differing == {"image", "env", "resources"}
    assert container["image"] == "vitrine-gpu:latest"
    assert CONTAINER["env"][0] in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert [metric["type"] for metric in autoscaler(built)] == ["Resource", "Pods"]


@pytest.mark.parametrize("version", VERSIONS)
def test_job_exports_the_model_to_the_volume_of_the_pods(version: str) -> None:
    job, claim, patch = (
        yaml.safe_load((MODEL / f"{name}.yaml").read_text())
        for name in ("job", "volume", "deployment")
    )
    for manifest in (job, claim):
        validate(manifest, version)
    pod, patched = job["spec"]["template"]["spec"], patch["spec"]["template"]["spec"]
    [export], [encode] = pod["containers"], patched["containers"]
    assert export["envFrom"] == encode["envFrom"]
    for spec, container in ((pod, export), (patched, encode)):
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert container["volumeMounts"][0]["mountPath"] == "/models"
    # The network policy of the serving pods would keep it from the hub.
    assert job["spec"]["template"]["metadata"]["labels"] != POD["metadata"]["labels"]
    secured = {**pod["securityContext"]}
    assert secured.pop("fsGroup") == POD["spec"]["securityContext"]["runAsGroup"]
    assert secured == POD["spec"]["securityContext"]
    assert export["securityContext"] == CONTAINER["securityContext"]


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_overlay_with_a_job_serves_the_model_that_it_exports() -> None:
    built = build(MODEL)
    for manifest in built.values():
        validate(manifest, VERSIONS[-1])
    [name] = built["ConfigMap"]["data"]
    assert name in {variable(group, name) for group, name, _ in table()}
    source = [{"configMapRef": {"name": built["ConfigMap"]["metadata"]["name"]}}]
    for kind in ("Job", "Deployment"):
        [container] = built[kind]["spec"]["template"]["spec"]["containers"]
        assert container["envFrom"] == source


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_built_overlay_is_valid_for_the_newest_kubernetes_apis(overlay: str) -> None:
    built = build(KUBERNETES / overlay)
    for kind in built.keys() - CUSTOM:
        for version in NEWEST:
            validate(built[kind], version)
    # Only the overlay of KEDA has no autoscaler, and never are there two.
    assert ("HorizontalPodAutoscaler" in built) != ("ScaledObject" in built)


# Fields of KEDA 2.18: https://keda.sh/docs/2.18/reference/scaledobject-spec/ and
# https://keda.sh/docs/2.18/scalers/prometheus/.
SCALER = {
    *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval"),
    *("cooldownPeriod", "advanced", "fallback", "triggers"),
}
TRIGGER = {
    *("serverAddress", "query", "threshold", "activationThreshold", "namespace"),
    *("customHeaders", "ignoreNullValues", "queryParameters", "unsafeSsl", "timeout"),
    "authModes",
}


def test_scaled_object_has_fields_of_keda_and_metrics_of_the_service(client: TestClient) -> None:
    scaler = yaml.safe_load((KEDA / "scaler.yaml").read_text())
    assert (scaler["apiVersion"], scaler["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaler["spec"]
    assert spec.keys() <= SCALER
    assert spec["scaleTargetRef"] == {"name": OWN["Deployment"]["metadata"]["name"]}
    client.post("/encode", json={"inputs": ["A text."]})
    exposed = set(re.findall(r"^(\w+)", client.get("/metrics").text, re.MULTILINE))
    job = MANIFESTS["Service"]["metadata"]["labels"]["app.kubernetes.io/component"]
    for trigger in spec["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metricType"] in {"AverageValue", "Value"}
        metadata = trigger["metadata"]
        assert metadata.keys() <= TRIGGER
        assert all(isinstance(value, str) for value in metadata.values())
        [(metric, selector)] = re.findall(r"(vitrine_\w+)\{(.*?)\}", metadata["query"])
        assert metric in exposed
        assert selector == f'job="{job}"'
    # KEDA hands the behaviour to an autoscaler.
    own = OWN["HorizontalPodAutoscaler"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    autoscaler = {**own, "spec": {**own["spec"], "behavior": behavior}}
    validate(autoscaler, NEWEST[-1])


@pytest.mark.kubectl
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", ["image-volume", "image-copy"])
def test_pods_serve_the_model_of_an_image(overlay: str) -> None:
    spec = build(KUBERNETES / overlay)["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    # The folder of the Dockerfile, below the mount.
    assert "COPY . /model\n" in (ROOT / "deploy/model.Dockerfile").read_text()
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["VITRINE_MODEL__PATH"] == "/models/model"
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == "models"]
    for copy in spec.get("initContainers", ()):
        assert copy["command"] == ["/bin/cp", "-r", "/model", "/models/"]
        assert copy["volumeMounts"] == [{"name": "models", "mountPath": "/models"}]
        assert copy["securityContext"] == CONTAINER["securityContext"]
    assert ("image" in volume) == (overlay == "image-volume")
    assert ("emptyDir" in volume) == ("initContainers" in spec)


def model_image(artifact: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `make model-image` with a `docker` that prints its arguments."""
    docker = folder / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    return subprocess.run(
        ["make", "--silent", "--directory", str(ROOT), "model-image", f"ARTIFACT={artifact}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )


# What the image contains is not tested: its base comes from a registry.
def test_model_image_has_the_hash_of_the_manifest_as_version(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"format": 8}')
    done = model_image(tmp_path, tmp_path)
    version = hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]
    assert done.returncode == 0
    arguments = done.stdout.split()
    assert arguments[0] == "build"
    assert f"org.opencontainers.image.version={version}" in arguments
    assert (ROOT / arguments[arguments.index("--file") + 1]).is_file()
    assert arguments[-1] == str(tmp_path)


def test_model_image_of_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    done = model_image(tmp_path / "absent", tmp_path)
    assert done.returncode != 0
    assert done.stdout == f"{tmp_path / 'absent'} is not an artifact: no manifest.json\n"


def autoscaler(manifests: dict[str, Any]) -> list[dict[str, Any]]:
    metrics: list[dict[str, Any]] = manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
    return metrics


def test_environment_variables_of_the_pods_are_settings() -> None:
    settings = {variable(group, name) for group, name, _ in table()}
    assert {entry["name"] for entry in CONTAINER["env"]} <= settings
    on_gpu = yaml.safe_load((GPU / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    environment = {
        entry["name"].removeprefix("VITRINE_ENGINE__").lower(): entry["value"]
        for entry in on_gpu["containers"][0]["env"]
    }
    assert EngineSettings(**environment).name in ENGINES
    assert environment["precision"] in ENGINES[environment["name"]].precisions
    # Service links would add VITRINE_... variables, which startup rejects as unknown settings.
    assert POD["spec"]["enableServiceLinks"] is False


def test_selectors_of_all_manifests_match_the_pods() -> None:
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
    selector = MANIFESTS["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= MANIFESTS["Service"]["metadata"]["labels"].items()
    target = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == MANIFESTS["Deployment"]["metadata"]["name"]


def test_ports_of_all_manifests_match_the_container() -> None:
    [port] = CONTAINER["ports"]
    assert f"EXPOSE {port['containerPort']}\n" in (ROOT / "Dockerfile").read_text()
    assert port["containerPort"] == ServerSettings().port
    [outer] = MANIFESTS["Service"]["spec"]["ports"]
    [rule] = MANIFESTS["NetworkPolicy"]["spec"]["ingress"]
    [endpoint] = MANIFESTS["ServiceMonitor"]["spec"]["endpoints"]
    probes = [CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    named = [outer["targetPort"], endpoint["port"], *(probe["port"] for probe in probes)]
    assert {*named, *(entry["port"] for entry in rule["ports"]), outer["name"]} == {port["name"]}


def test_probed_routes_and_the_autoscaling_metric_exist(client: TestClient) -> None:
    for name in ("startup", "readiness", "liveness"):
        assert client.get(CONTAINER[f"{name}Probe"]["httpGet"]["path"]).status_code == 200
    [endpoint] = MANIFESTS["ServiceMonitor"]["spec"]["endpoints"]
    exposed = set(re.findall(r"^(\w+)", client.get(endpoint["path"]).text, re.MULTILINE))
    [_, queue] = autoscaler(MANIFESTS)
    own = queue["pods"]["metric"]["name"]
    assert own in exposed


def test_termination_grace_period_covers_drain_and_shutdown() -> None:
    server = ServerSettings()
    assert POD["spec"]["terminationGracePeriodSeconds"] > server.drain_s + server.grace_s
    # The pod leaves the Service before its port closes.
    probe = CONTAINER["readinessProbe"]
    unready_s = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert unready_s < server.drain_s


def test_pod_meets_the_restricted_security_standard() -> None:
    pod, container = POD["spec"]["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"]
    assert f"--uid {pod['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    assert pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["allowPrivilegeEscalation"] is False
    assert container["readOnlyRootFilesystem"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert MANIFESTS["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in MANIFESTS["NetworkPolicy"]["spec"]
