"""`vitrine-serve --check`: checks everything that a start needs, without opening a port."""

import asyncio
import ipaddress
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from models.artifact import Artifact
from models.engines import EngineError, select_engine
from models.manifest import ArtifactError
from models.printable import printable
from service.api.compat import tei
from service.app import open_exporter
from service.artifacts import with_artifacts
from service.inference.model.opening import ModelOptions, open_model
from service.inference.registry.model_names import check_name
from service.inference.registry.registry import ModelRegistry
from service.settings import Settings

log = logging.getLogger("vitrine")


def check(settings: Settings, *, refresh: bool = False) -> bool:
    """Print one line per check, and return whether the service can start with the settings.

    Models that are not artifacts are exported; see `with_artifacts`.
    """
    checks: list[Callable[[], str]] = [partial(check_access, settings), check_traces]
    try:
        settings = with_artifacts(settings, refresh=refresh)
    except (ArtifactError, OSError) as error:
        checks.append(partial(_fail, error))
    else:
        checks.append(partial(check_names, settings))
        with suppress(ArtifactError, ValueError):  # then `check_names` fails
            specs = settings.model_specs()
            checks += [partial(check_model, spec.path, spec.options) for spec in specs]
    problems: set[str] = set()  # of which each is printed once
    passes = [_passes(run, problems) for run in checks]
    return all(passes)


def check_settings(settings: Settings) -> None:
    """Check all that can refuse a start before its models are exported, which takes longer.

    Raises:
        ArtifactError: `models.folder` has no artifact, or `models.verify` no key.
        EngineError: An engine is unknown or unavailable on this machine.
        OSError: The keys file cannot be read, or the port cannot be opened.
        ValueError: Any error of `check_access` or `check_traces`, a name of a model is invalid, or
            any error of `Settings.model_specs`.
    """
    check_access(settings)
    check_traces()
    if settings.models.verify is not None:
        from models.signing import read_public_key  # imports cryptography

        read_public_key(settings.models.verify)
    for spec in settings.model_specs():
        select_engine(None, spec.options.engine, spec.options.precision)
        for name in filter(None, (spec.options.name, *spec.aliases)):
            check_name(name)
            tei.check_name(name)
    check_port(settings.server.host, settings.server.port)


def _fail(error: Exception) -> NoReturn:
    raise error


def _passes(run: Callable[[], str], problems: set[str]) -> bool:
    try:
        print(printable(f"vitrine-serve: {run()}"))
    except (ArtifactError, EngineError, OSError, ValueError) as error:
        if str(error) not in problems:
            print(printable(f"vitrine-serve: {error}"), file=sys.stderr)
        problems.add(str(error))
        return False
    except Exception:
        log.exception("cannot start")
        return False
    return True


def check_access(settings: Settings) -> str:
    """Return a sentence about who has access to the service.

    Raises:
        OSError: The keys file cannot be read.
        ValueError: The API keys are invalid, or gradients are open to other machines.
    """
    keys = settings.auth.all_keys()
    if keys:
        return f"API keys are valid: {', '.join(key.name for key in keys)}"
    return access_warning(settings) or "no API key is set: everybody on this machine has access"


def access_warning(settings: Settings) -> str:
    """Return a warning if a service without API keys is open to other machines; else "".

    Raises:
        ValueError: The gradient routes are open to other machines too.
    """
    host = settings.server.host
    if _is_loopback(host):
        return ""
    if settings.debug.enabled:
        raise ValueError(
            f"{host} is reachable from other machines without an API key, and gradients reveal the "
            "model: set API keys, or set debug.enabled to false"
        )
    return (
        f"{host} is reachable from other machines and no API key is set: everybody has access; "
        "set API keys"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_traces() -> str:
    """Return a sentence about where traces are exported.

    Raises:
        ValueError: Any error of `open_exporter`, under the same conditions.
    """
    exporter = open_exporter()
    if exporter is None:
        return "no traces are exported"
    exporter.close()
    return f"traces are exported to {exporter.endpoint}"


def check_port(host: str, port: int) -> None:
    """Open a port, and close it again.

    Raises:
        OSError: The port is in use, or the address is none of this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in addresses:
            socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        # A strerror without the address; a name with an empty or too long part has none.
        reason = (getattr(error, "strerror", None) or "Invalid host name").partition(" (")[0]
        raise OSError(
            f"port {port} of {host} cannot be opened: {reason}; choose another with --server.port "
            "or --server.host"
        ) from error


def check_names(settings: Settings) -> str:
    """Return a sentence about the names of the served models.

    Raises:
        ArtifactError: An artifact is incomplete or invalid.
        EngineError: An engine is unknown or unavailable on this machine.
        ValueError: The settings of the models are invalid; see `ModelRegistry.register`.
    """
    registry = ModelRegistry(
        default=settings.models.default,
        max_bytes=settings.models.max_bytes,
        check_path=tei.check_name,
    )
    asyncio.run(registry.register(settings.model_specs()))
    names = ", ".join(status.name for status in registry.statuses())
    default = next((status.name for status in registry.statuses() if status.is_default), "none")
    return f"served models: {names}; default: {default}"


def check_model(path: Path, options: ModelOptions) -> str:
    """Verify all files of an artifact, open its model, and return a sentence about the self-check.

    Raises:
        ArtifactError: The artifact is incomplete or invalid, or was modified after its export.
        EngineError: The engine is unknown or unavailable on this machine, or fails the self-check.
    """
    artifact = Artifact.load(path, options.verify)
    artifact.verify_all()  # a start without `models.verify` leaves some files to this check

    async def open_and_close() -> str:
        async with await open_model(path, options) as model:
            engine = model.engine
            signed = f", and signed by the key {artifact.signed_by}" if artifact.signed_by else ""
            return (
                f"{path} passes the self-check: {model.name}, engine {engine.name} in "
                f"{engine.precision}; all {len(artifact.manifest.files)} files are as exported"
                f"{signed}"
            )

    return asyncio.run(open_and_close())
