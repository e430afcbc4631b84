"""All settings, frozen. The only module that reads the environment.

A setting `group.name` is the variable `VITRINE_GROUP__NAME` and the option `--group.name`.
"""

import os
import re
import stat
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from models.engines import Precision
from service.inference.model import ModelOptions
from service.logs import LogFormat

Scope = Literal["encode", "debug", "metrics"]
SCOPES: tuple[Scope, ...] = ("encode", "debug", "metrics")
# Variables such as VITRINE_SERVICE_HOST and VITRINE_PORT_8000_TCP_ADDR.
_SERVICE_LINK = re.compile(r"VITRINE(_[A-Z0-9]+)*_(SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+)")


# Host names are compared without case.
HostName = Annotated[str, AfterValidator(str.lower)]


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(_Group):
    """HTTP server: address, shutdown and logs."""

    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free port")
    hosts: tuple[HostName, ...] = Field((), description="Allowed host names; none: all")
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins of web pages with access, such as `https://app.example`"
    )
    log: LogFormat = Field("text", description="Log format: `text` or `json`")
    drain_s: float = Field(
        5.0, ge=0, description="Seconds from SIGTERM, with /readyz at 503, until the port closes"
    )
    grace_s: int = Field(
        20, ge=0, description="Seconds after that until requests in flight are aborted"
    )
    access_log: bool = Field(False, description="Whether to log each request")
    slow_s: float = Field(
        1.0, gt=0, description="Seconds after which the access log marks a request as slow"
    )
    gzip: bool = Field(
        False, description="Whether to compress responses for clients that accept gzip"
    )
    tei_at_root: bool = Field(False, description="Whether to serve the routes under /tei at / too")


class ModelSettings(_Group):
    """Served model."""

    path: Path = Field(
        Path("artifacts/all-MiniLM-L6-v2"), description="Artifact written by vitrine-export"
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name of the served model; none: the artifact's name",
    )


class EngineSettings(_Group):
    """Engine that runs the graph."""

    name: str = Field("auto", description="Name of the engine, or `auto`")
    precision: Precision = Field(
        "float32", description="Precision of the engine: `float32`, `float16` or `bfloat16`"
    )
    threads: int = Field(
        0, ge=0, description="Number of CPUs for an engine on CPU; 0: all of the quota"
    )
    gpu: int = Field(0, ge=0, description="Index of the GPU for the engine `cuda`")
    timeout_s: float = Field(
        10.0, gt=0, description="Seconds after which a batch is cancelled and run in halves"
    )


class BatchSettings(_Group):
    """Batches and their queue."""

    max_cost: int = Field(
        0,
        ge=0,
        description="Cost budget of a batch: tokens plus padded attention; 0: the engine's default",
    )
    max_queue_tokens: int = Field(
        1_000_000, ge=1, description="Limit of queued tokens; beyond it, requests get 429"
    )


class LimitSettings(_Group):
    """Limits of a request."""

    max_inputs: int = Field(2048, ge=1, description="Limit of inputs per request")
    max_chars: int = Field(100_000, ge=1, description="Limit of characters per text")
    max_token_vectors: int = Field(
        16_384, ge=1, description="Limit of tokens per response that lists tokens or their vectors"
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1, description="Limit of bytes per request body")
    max_bodies_bytes: int = Field(
        64 * 2**20,
        ge=1,
        description="Limit of bytes of all bodies over 64 KiB in flight; beyond it, they get 429",
    )
    body_s: float = Field(30.0, gt=0, description="Seconds until a body must have arrived")
    request_s: float = Field(
        120.0,
        gt=0,
        description="Deadline of a request in seconds; X-Request-Timeout-Ms lowers it",
    )


class DebugSettings(_Group):
    """Gradient routes under /debug."""

    enabled: bool = Field(False, description="Whether the routes under /debug are enabled")
    device: str = Field("auto", description="Device for gradients: `auto`, `cpu`, `cuda`, `cuda:1`")
    hosts: tuple[HostName, ...] = Field(
        ("localhost", "127.0.0.1", "[::1]"),
        description="Allowed host names of the routes under /debug",
    )
    max_tokens: int = Field(256, ge=3, description="Limit of tokens per text of a gradient request")
    max_token_steps: int = Field(
        131_072,
        ge=1,
        description="Limit of tokens that a gradient request runs through the model",
    )
    max_waiting: int = Field(4, ge=0, description="Limit of queued gradient requests")
    deadline_s: float = Field(
        60.0, gt=0, description="Seconds after which a gradient job is aborted"
    )
    full_gradients: bool = Field(False, description="Whether /debug/vjp may return full gradients")
    max_jobs: int = Field(
        1000, ge=1, description="Number of jobs after which the gradient process is replaced"
    )


def _check_key(key: SecretStr) -> SecretStr:
    # Characters that a header can carry; a trailing newline is the usual mistake.
    if not re.fullmatch(r"[!-~]{16,}", key.get_secret_value()):
        raise ValueError("a key is at least 16 printable ASCII characters without spaces")
    return key


class ApiKey(_Group):
    """An API key and its scopes."""

    name: str = Field(min_length=1)
    key: Annotated[SecretStr, AfterValidator(_check_key)]
    scopes: tuple[Scope, ...] = ("encode",)


class AuthSettings(_Group):
    """API keys. Without any, everybody has access."""

    keys: tuple[ApiKey, ...] = Field(
        (), description='JSON: `[{"name": "...", "key": "...", "scopes": ["encode"]}]`'
    )
    keys_file: Path | None = Field(
        None, description="File with the same JSON, such as a mounted secret"
    )

    def all_keys(self) -> tuple[ApiKey, ...]:
        """Return the keys of the environment and of the file.

        Raises:
            ValueError: The file cannot be read, is invalid or writable by others, or two keys are
                equal.
        """
        keys = self.keys
        if self.keys_file is not None:
            keys += _read_keys(self.keys_file)
        if len({key.key.get_secret_value() for key in keys}) < len(keys):
            raise ValueError("two API keys are equal")
        return keys


def _read_keys(file: Path) -> tuple[ApiKey, ...]:
    # Readable by others is accepted: Docker and Kubernetes mount secrets with mode 0444 or 0644.
    if file.stat().st_mode & stat.S_IWOTH:
        raise ValueError(f"auth.keys_file: {file} is writable by others; run chmod o-w on it")
    try:
        return TypeAdapter(tuple[ApiKey, ...]).validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = "/".join(map(str, problem["loc"]))
        raise ValueError(f"auth.keys_file: {file}: {where}: {problem['msg']}") from None


class Settings(BaseSettings):
    """All settings of the service."""

    model_config = SettingsConfigDict(
        env_prefix="VITRINE_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        cli_prog_name="vitrine-serve",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        hide_input_in_errors=True,
    )

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    batch: BatchSettings = BatchSettings()
    limits: LimitSettings = LimitSettings()
    auth: AuthSettings = AuthSettings()
    debug: DebugSettings = DebugSettings()

    def model_options(self) -> ModelOptions:
        """Return the options of the served model."""
        return ModelOptions(
            name=self.model.name,
            engine=self.engine.name,
            precision=self.engine.precision,
            threads=self.engine.threads,
            gpu=self.engine.gpu,
            run_timeout_s=self.engine.timeout_s,
            max_cost=self.batch.max_cost,
            max_queue_tokens=self.batch.max_queue_tokens,
            max_chars=self.limits.max_chars,
            max_token_vectors=self.limits.max_token_vectors,
        )


def table() -> list[tuple[str, str, str]]:
    """Return group, name and description of every setting."""
    rows: list[tuple[str, str, str]] = []
    for group, outer in Settings.model_fields.items():
        fields = type(outer.default).model_fields
        rows += [(group, name, field.description or "") for name, field in fields.items()]
    return rows


def variable(group: str, name: str) -> str:
    """Return the environment variable of a setting."""
    return f"VITRINE_{group}__{name}".upper()


def from_command_line(arguments: Sequence[str]) -> Settings:
    """Return the settings of the environment, overridden by the options in `arguments`.

    Raises:
        ValueError: A variable is no setting but looks like one, or a value is invalid.
        SystemExit: `--help` was requested, or an option is unknown.
    """
    known = {variable(group, name) for group, name, _ in table()}
    for name in sorted(os.environ.keys() - known):
        if name.startswith("VITRINE_") and not _is_service_link(name, os.environ[name]):
            _check_variable(name, known)
    return Settings(_cli_parse_args=list(arguments))


def _is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes sets this variable, as it does for a service named vitrine."""
    return bool(_SERVICE_LINK.fullmatch(name)) or value.startswith(("tcp://", "udp://"))


def _check_variable(name: str, known: Collection[str]) -> None:
    """Raise a ValueError if a variable was meant as a setting."""
    similar = get_close_matches(name, known, n=1, cutoff=0.9)
    if "__" in name or similar:
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise ValueError(f"{name} is no setting{hint}; vitrine-serve --help lists all settings")
