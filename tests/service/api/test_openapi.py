"""The OpenAPI document and the page of documentation."""

import json
import re
from typing import Any

from pydantic import SecretStr
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import ApiKey, AuthSettings, DebugSettings, Settings


def operations_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    paths = document["paths"].values()
    return {operation["operationId"]: operation for path in paths for operation in path.values()}


NATIVE = {"encode", "classify", "rerank", "score", "tag", "health", "healthz", "readyz"}
NATIVE |= {"info", "metrics"}
NATIVE |= {"list_models", "model_info", "model_calibration", "load_model", "delete_model"}
NATIVE |= {"process_state"}
COHERE = {"v1_embed", "v2_embed"}
OPENAI = {"embeddings", "models", "model"}
TEI_PROBES = {"tei_health", "tei_root", "tei_ping"}  # one probe under three paths
TEI = {"tei", "tei_embed", "embed_all", "embed_sparse", "similarity", "tokenize", "decode"}
TEI |= {"tei_info", "tei_rerank", "tei_predict"}
RERANK = {"v1_rerank", "v2_rerank", "vllm_rerank", "vllm_score", "vllm_v1_score", "vllm_classify"}
DEBUG = {
    *("attribute", "pair", "flow", "layer_norm", "parity", "vjp", "activations", "patch"),
    "capabilities",
}


def test_openapi_document_has_unique_ids_and_resolvable_references(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    operations = operations_of(document)
    assert operations.keys() == NATIVE | OPENAI | COHERE | RERANK | TEI | TEI_PROBES
    encode = operations["encode"]
    assert set(encode["responses"]) == {
        "200", "400", "401", "403", "404", "408", "413", "415", "422", "429", "500", "503", "504",
    }  # fmt: skip
    content = encode["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "application/octet-stream"}
    references = set(re.findall(r"#/(?:components/schemas|\$defs)/(\w+)", json.dumps(document)))
    assert references <= document["components"]["schemas"].keys()


def test_openapi_document_lists_headers_and_limits(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    encode = operations_of(document)["encode"]
    parameters = {parameter["name"]: parameter["in"] for parameter in encode["parameters"]}
    names = ("X-Request-Id", "X-Request-Timeout-Ms", "X-Priority")
    assert parameters == dict.fromkeys(names, "header")
    headers = encode["responses"]["200"]["headers"]
    assert headers.keys() == {
        *("Server-Timing", "X-Model-Version", "X-Space-Version", "X-Engine", "X-Shape", "X-Dtype"),
        "X-Request-Id",
    }
    assert "Retry-After" in encode["responses"]["429"]["headers"]
    limits = client.get("/info").json()["limits"]
    for schema, field in (("EncodeRequest", "inputs"), ("EmbeddingsRequest", "input")):
        choices = document["components"]["schemas"][schema]["properties"][field]["oneOf"]
        [text] = [choice for choice in choices if choice["type"] == "string"]
        assert text["maxLength"] == limits["max_chars"]
        [texts] = [c for c in choices if c.get("items", {}).get("type") == "string"]
        assert texts["items"]["maxLength"] == limits["max_chars"]
        assert texts["maxItems"] == limits["max_inputs"]
    schemas = document["components"]["schemas"]
    texts = schemas["CohereEmbedRequest"]["properties"]["texts"]
    assert texts["maxItems"] == limits["max_inputs"]
    assert texts["items"]["maxLength"] == limits["max_chars"]
    assert schemas["LoadRequest"]["properties"]["texts"]["maxItems"] == 256  # a limit of its own
    documents = schemas["RerankRequest"]["properties"]["documents"]
    assert documents["maxItems"] == limits["max_inputs"]
    _, inputs = schemas["ClassifyRequest"]["properties"]["inputs"]["oneOf"]
    text, pair = inputs["items"]["oneOf"]
    assert (inputs["maxItems"], pair["maxItems"]) == (limits["max_inputs"], 2)
    assert text["maxLength"] == pair["items"]["maxLength"] == limits["max_chars"]


def test_openapi_document_lists_keys_and_debug_routes_only_if_configured(
    client: TestClient, settings: Settings
) -> None:
    keys = (ApiKey(name="app", key=SecretStr("a-key-of-some-length")),)
    changes = {"auth": AuthSettings(keys=keys), "debug": DebugSettings(enabled=True)}
    document = create_app(settings.model_copy(update=changes)).openapi()
    operations = operations_of(document)
    assert operations.keys() == NATIVE | OPENAI | COHERE | RERANK | TEI | TEI_PROBES | DEBUG
    schemes = document["components"]["securitySchemes"]
    assert schemes.keys() == {"Bearer", "XApiKey", "ApiKey"}
    secured = {name for name, operation in operations.items() if "security" in operation}
    assert secured == operations.keys() - {"health", "healthz", "readyz"} - TEI_PROBES
    assert operations["encode"]["security"] == [{name: []} for name in schemes]
    without = client.get("/openapi.json").json()
    assert "securitySchemes" not in without["components"]
    assert not any("security" in operation for operation in operations_of(without).values())


def test_root_redirects_to_the_documentation(client: TestClient) -> None:
    response = client.get("/", follow_redirects=False)
    assert (response.status_code, response.headers["Location"]) == (307, "/docs")


def test_documentation_page_loads_no_external_resources(client: TestClient) -> None:
    page = client.get("/docs").text
    scripts = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert scripts
    for script in scripts:
        assert script.startswith("/")
        assert client.get(script).status_code == 200
