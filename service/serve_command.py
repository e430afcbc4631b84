"""`vitrine-serve`: the command line of the service."""

import argparse
import asyncio
import faulthandler
import json
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from pydantic import ValidationError
from pydantic_settings import SettingsError

from models.engines import EngineError
from models.manifest import ArtifactError, Manifest
from models.printable import printable
from service.api.schemas import EXAMPLE_INPUTS
from service.api.server import Server
from service.app import create_app
from service.artifacts import with_artifacts
from service.check import access_warning, check, check_settings
from service.debug.pipeline.state import DebugState
from service.debug.process_state import report
from service.logs import configure
from service.model_cache import model_path
from service.settings import (
    ModelSettings,
    Settings,
    from_command_line,
    ignored_variables,
    problems,
)

log = logging.getLogger("vitrine")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors leave out the usage, which would list every setting."""

    def error(self, message: str) -> NoReturn:
        """Print the error and how to list the options, and exit with status 2."""
        unknown = re.findall(r"--[\w.-]+", message.partition("unrecognized arguments:")[2])
        similar = [
            match
            for option in unknown
            for match in get_close_matches(option, self._option_string_actions, n=1)
        ]
        hint = f"; did you mean {' '.join(similar)}?" if similar else ""
        self.exit(2, f"{self.prog}: {message}{hint}; {self.prog} --help lists all options\n")


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    """Return the settings, and the options `check` and `refresh`.

    Raises:
        ValueError: Any error of `from_command_line`, or a model is named twice or beside several.
        SystemExit: `--help` was requested, or an option is unknown.
    """
    parser = _Parser("vitrine-serve", description="Serve models over HTTP.")
    parser.add_argument(
        "name",
        metavar="MODEL",
        nargs="?",
        type=model_path,
        help="artifact, model folder, installed package or hub id; the same as --model.path",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check settings, API keys and artifacts without serving; exit with status 0 or 2",
    )
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="export models again, hub models from their newest commit",
    )
    settings = from_command_line(arguments, parser)
    options = parser.parse_args(arguments)
    if options.refresh and settings.models.folder:
        raise ValueError(
            "--refresh exports models again, and models.folder has exported ones alone"
        )
    if options.name is not None:
        if settings.models.folder or settings.models.served:
            raise ValueError("MODEL and the settings models.folder and models.served are exclusive")
        if vars(options).get("model.path") is not None:
            raise ValueError("MODEL and --model.path are the same option; set one of them")
        model = ModelSettings(path=options.name, name=settings.model.name)
        settings = settings.model_copy(update={"model": model})
    return settings, options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrine-serve` and return its exit status."""

    def greet() -> None:
        if server.started:
            _greet(server, settings, state)
        else:  # to look up the name of a host can take longer than to load a model
            asyncio.get_running_loop().call_later(0.1, greet)

    try:
        settings, options = parse(sys.argv[1:] if arguments is None else arguments)
        configure(settings.server.log)
        for name in ignored_variables():
            log.warning("%s is not a setting and is ignored", name)
        if options.check:
            return 0 if check(settings, refresh=options.refresh) else 2
        check_settings(settings)
        settings = with_artifacts(settings, refresh=options.refresh)
        app = create_app(settings, on_ready=greet)
        state: DebugState = app.state.vitrine
        warning = access_warning(settings) if state.keys.is_open else ""
    except ValidationError as error:
        for problem in problems(error):
            print(printable(f"vitrine-serve: {problem}"), file=sys.stderr)
        return 2
    except (ArtifactError, EngineError, ValueError, OSError, SettingsError) as error:
        print(printable(f"vitrine-serve: {error}"), file=sys.stderr)
        return 2
    if warning:
        log.warning("%s", warning)
    # Libraries crash if no memory is left, such as orjson with SIGSEGV: say which was running.
    faulthandler.enable()
    server = Server(app, state, settings.server, lambda: _log_state(state))
    server.run()
    return 0


def _greet(server: Server, settings: Settings, state: DebugState) -> None:
    """Log the URLs of the service and an example request.

    The port is read from the socket, because the system chooses it if `server.port` is 0.
    """
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    statuses = state.registry.statuses()
    loaded = (status for status in statuses if status.model is not None)
    example = max(loaded, key=lambda status: status.is_default)
    assert example.model is not None  # noqa: S101 - chosen so
    path, body = example_request(example.model.artifact.manifest)
    if not example.is_default:
        body["model"] = example.name
    key = "" if state.keys.is_open else " -H 'Authorization: Bearer KEY'"
    log.info("Serving %s on %s", ", ".join(status.name for status in statuses), url)
    log.info("Docs on %s/docs", url)
    if settings.server.page:
        log.info("Page of explanations on %s/debug", url)
    log.info(
        "Try: curl %s%s%s -H 'Content-Type: application/json' -d %s",
        *(url, path, key, shlex.quote(json.dumps(body))),
    )


def example_request(manifest: Manifest) -> tuple[str, dict[str, object]]:
    """Return the path and the body of a request that shows what a kind of model is for."""
    output = manifest.outputs[0]
    if output == "multi" or (output == "logits" and len(manifest.labels) == 1):
        documents = ["It rained all day in Bergen.", EXAMPLE_INPUTS[0]]
        return "/rerank", {"query": "Where did the cat sit?", "documents": documents}
    if output == "tags":
        return "/tag", {"inputs": "Sarah lives in London."}
    if output == "spans":
        return "/tag", {"inputs": "Sarah lives in London.", "labels": ["person", "city"]}
    path = "/classify" if output == "logits" else "/encode"
    return path, {"inputs": EXAMPLE_INPUTS}


def _log_state(state: DebugState) -> None:
    log.info("state: %s", report(state).model_dump_json())
