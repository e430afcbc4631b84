"""All settings, frozen; the only reader of the environment.

A setting `group.name` is the variable `VITRINE_GROUP__NAME` and the option `--group.name`.
"""

import os
import re
import stat
from collections.abc import Sequence
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
from service.logs import LogFormat

Scope = Literal["encode", "debug", "metrics"]
SCOPES: tuple[Scope, ...] = ("encode", "debug", "metrics")


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(_Group):
    """Where the service listens, and how it stops."""

    host: str = Field("127.0.0.1", description="Address to bind")
    port: int = Field(8000, ge=0, le=65535, description="Port to bind; 0 takes a free one")
    hosts: tuple[str, ...] = Field((), description="Host names that are answered to; none: all")
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins of web pages that may call, as `https://app.example`"
    )
    log: LogFormat = Field("text", description="Lines for people, or `json`")
    drain_s: float = Field(
        5.0, ge=0, description="Seconds from SIGTERM, with /readyz at 503, until the port closes"
    )
    grace_s: int = Field(20, ge=0, description="Seconds after that for the requests in flight")


class ModelSettings(_Group):
    """What it serves."""

    path: Path = Field(
        Path("artifacts/all-MiniLM-L6-v2"), description="Artifact that vitrine-export wrote"
    )


class EngineSettings(_Group):
    """What runs the graph."""

    name: str = Field("auto", description="`auto`, or a line of the table of engines")
    precision: Precision = Field(
        "float32", description="What the engine computes in: `float32`, `float16` or `bfloat16`"
    )
    threads: int = Field(
        0, ge=0, description="CPUs that an engine keeps busy on CPU; 0: all of the quota"
    )
    gpu: int = Field(0, ge=0, description="GPU that the engine `cuda` computes on")
    timeout_s: float = Field(
        10.0, gt=0, description="Seconds after which a batch is cancelled and run in halves"
    )


class BatchSettings(_Group):
    """How batches are formed."""

    max_tokens: int = Field(
        0,
        ge=0,
        description="Cost of a batch: its tokens plus its padded attention; 0: as suits the engine",
    )
    max_queue_tokens: int = Field(
        1_000_000, ge=1, description="Tokens that may wait; more are refused with 429"
    )


class LimitSettings(_Group):
    """What a request may ask for."""

    max_inputs: int = Field(2048, ge=1, description="Inputs of a request")
    max_chars: int = Field(100_000, ge=1, description="Characters of one text")
    max_token_vectors: int = Field(
        16_384, ge=1, description="Tokens that one answer may list, or hold the vectors of"
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1, description="Bytes of a request body")
    body_s: float = Field(30.0, gt=0, description="Seconds in which a body has to be there")
    request_s: float = Field(
        120.0, gt=0, description="Seconds to encode in; X-Request-Timeout-Ms asks for less"
    )


class DebugSettings(_Group):
    """The gradient routes under /debug."""

    enabled: bool = Field(False, description="Whether the routes under /debug answer")
    device: str = Field(
        "auto", description="Where gradients are computed: `auto`, `cpu`, `cuda`, `cuda:1`"
    )
    hosts: tuple[str, ...] = Field(
        ("localhost", "127.0.0.1", "[::1]"),
        description="Host names that the routes under /debug answer to",
    )
    max_tokens: int = Field(256, ge=3, description="Tokens of one text in a gradient request")
    max_token_steps: int = Field(
        131_072, ge=1, description="Tokens that one gradient request may run through the twin"
    )
    max_waiting: int = Field(4, ge=0, description="Gradient requests that wait while one runs")
    deadline_s: float = Field(60.0, gt=0, description="Seconds after which a gradient job is ended")
    full_gradients: bool = Field(
        False, description="Whether /debug/vjp may return all of a gradient"
    )
    max_jobs: int = Field(
        1000, ge=1, description="Jobs after which the gradient process is replaced"
    )


def _check_key(key: SecretStr) -> SecretStr:
    # What a header can carry as it is; a trailing newline is the usual accident.
    if not re.fullmatch(r"[!-~]{16,}", key.get_secret_value()):
        raise ValueError("a key is at least 16 printable ASCII characters without spaces")
    return key


class ApiKey(_Group):
    """A key and what it opens."""

    name: str = Field(min_length=1)
    key: Annotated[SecretStr, AfterValidator(_check_key)]
    scopes: tuple[Scope, ...] = ("encode",)


class AuthSettings(_Group):
    """Who may call. No key at all means that everybody may."""

    keys: tuple[ApiKey, ...] = Field(
        (), description='JSON: `[{"name": "...", "key": "...", "scopes": ["encode"]}]`'
    )
    keys_file: Path | None = Field(
        None, description="File with the same JSON, not readable by others"
    )

    def all_keys(self) -> tuple[ApiKey, ...]:
        """Return the keys of the environment and of the file.

        Raises:
            ValueError: The file cannot be read, is not such JSON, others may read it, or two keys
                are the same.
        """
        keys = self.keys
        if self.keys_file is not None:
            keys += _read_keys(self.keys_file)
        if len({key.key.get_secret_value() for key in keys}) < len(keys):
            raise ValueError("two API keys are the same")
        return keys


def _read_keys(file: Path) -> tuple[ApiKey, ...]:
    if file.stat().st_mode & stat.S_IRWXO:
        raise ValueError(f"auth.keys_file: {file} can be read by everybody; chmod o= it")
    try:
        return TypeAdapter(tuple[ApiKey, ...]).validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = "/".join(map(str, problem["loc"]))
        raise ValueError(f"auth.keys_file: {file}: {where}: {problem['msg']}") from None


class Settings(BaseSettings):
    """Every setting of the service."""

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
    """Return the settings of the environment, with options in `arguments` on top.

    Raises:
        ValueError: A variable is not a setting, or a value does not fit its setting.
        SystemExit: `--help` was asked for, or an option is not known.
    """
    known = {variable(group, name) for group, name, _ in table()}
    for name in sorted(os.environ):
        if name.startswith("VITRINE_") and name not in known:
            raise ValueError(f"{name} is no setting; vitrine-serve --help lists them")
    return Settings(_cli_parse_args=list(arguments))
