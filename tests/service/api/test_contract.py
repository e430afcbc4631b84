"""The service against its OpenAPI document, with schemathesis."""

import json
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.service.api.conftest import Start
from tests.serving import PATIENCE_S, url_of

pytestmark = pytest.mark.slow  # starts processes

KEY = "a-key-for-everything"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.mark.timeout(3600)  # schemathesis sends thousands of requests
def test_every_route_conforms_to_the_openapi_document(start: Start, tmp_path: Path) -> None:
    keys = [{"name": "all", "key": KEY, "scopes": ["encode", "debug", "metrics"]}]
    with start(
        *("-m", "tests.service.debug.held_worker"),
        VITRINE_DEBUG__ENABLED="true",
        VITRINE_AUTH__KEYS=json.dumps(keys),
    ) as started:
        url = url_of(started)
        # Headers are tested elsewhere: schemathesis reports a server that accepts headers which its
        # document does not name, or that returns 504 after a deadline of 1 ms.
        document = httpx2.get(f"{url}/openapi.json", timeout=PATIENCE_S).json()
        operations = [
            operation for path in document["paths"].values() for operation in path.values()
        ]
        for operation in operations:
            operation["parameters"] = [p for p in operation["parameters"] if p["in"] != "header"]
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        run = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli"),
                f"--config-file={Path(__file__).with_name('schemathesis.toml')}",
                *(
                    "run",
                    "openapi.json",
                    f"--url={url}",
                    f"--header=Authorization: Bearer {KEY}",
                ),
                *(f"--checks={','.join(CHECKS)}", "--max-examples=8", "--seed=1", "--no-color"),
                *("--request-timeout=60", "--suppress-health-check=all"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout
        assert f"{len(operations)} selected" in run.stdout
        assert httpx2.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200
