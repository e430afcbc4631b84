"""`vitrine-serve`: the command line of the service."""

import ipaddress
import json
import logging
import sys

from pydantic import ValidationError
from pydantic_settings import SettingsError

from service.api.schemas import EXAMPLE_INPUTS
from service.api.server import Server
from service.app import create_app
from service.debug.operations import report
from service.debug.state import DebugState
from service.logs import configure
from service.settings import Settings, from_command_line

log = logging.getLogger("vitrine")


def main() -> int:
    """Run `vitrine-serve` and return its exit status."""

    def greet() -> None:
        _greet(server, settings, state)

    try:
        settings = from_command_line(sys.argv[1:])
        configure(settings.server.log)
        app = create_app(settings, on_ready=greet)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            where = ".".join(map(str, problem["loc"])) or "settings"
            print(f"vitrine-serve: {where}: {problem['msg']}", file=sys.stderr)
        return 2
    except (ValueError, OSError, SettingsError) as error:
        print(f"vitrine-serve: {error}", file=sys.stderr)
        return 2
    state: DebugState = app.state.vitrine
    is_exposed = not _is_loopback(settings.server.host) and state.keys.is_open
    if is_exposed and settings.debug.enabled:
        print(
            f"vitrine-serve: {settings.server.host} is reachable from other machines without an "
            "API key, and gradients reveal the model: set API keys, or set debug.enabled to false",
            file=sys.stderr,
        )
        return 2
    if is_exposed:
        log.warning(
            "%s is reachable from other machines and no API key is set: everybody has "
            "access; set API keys",
            settings.server.host,
        )
    server = Server(app, state, settings.server, lambda: _log_state(state))
    server.run()
    return 0


def _greet(server: Server, settings: Settings, state: DebugState) -> None:
    """Log the URLs of the service and an example request.

    The port is read from the socket, because the system chooses it if `server.port` is 0.
    """
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    body: dict[str, object] = {"inputs": EXAMPLE_INPUTS}
    statuses = state.registry.statuses()
    example = next(status for status in statuses if status.model is not None)
    assert example.model is not None  # noqa: S101 - chosen so
    if not any(status.is_default for status in statuses):
        body["model"] = example.name
    outputs = example.model.artifact.manifest.outputs
    route = {"logits": "classify", "tags": "tag"}.get(outputs[0], "encode")
    key = "" if state.keys.is_open else " -H 'Authorization: Bearer KEY'"
    log.info("Serving %s on %s", ", ".join(status.name for status in statuses), url)
    log.info("Docs on %s/docs", url)
    if settings.debug.enabled and "pooled" in outputs:
        log.info("Gradient debugging page on %s/debug", url)
    log.info(
        "Try: curl %s/%s%s -H 'Content-Type: application/json' -d '%s'",
        *(url, route, key, json.dumps(body)),
    )


def _log_state(state: DebugState) -> None:
    log.info("state: %s", report(state).model_dump_json())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
