"""The settings of the service, as immutable pydantic models.

No other module of `service` reads these environment variables, but `model_cache` two of the group
`models`, for commands without settings.

The setting `group.name` is the environment variable `VITRINE_GROUP__NAME` and the command-line
option `--group.name`.
"""

import argparse
import codecs
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, CliSettingsSource, NoDecode, SettingsConfigDict

from models.engines import Precision
from models.engines.cpus import MAX_THREADS
from models.json_reader import JsonError, check_depth, parse_json
from service.inference.model.opening import ModelOptions
from service.inference.registry.served_models import ModelSpec, specs_in
from service.logs import LogFormat
from service.model_cache import LocalPath, absolute_if_local

Scope = Literal["encode", "bulk", "debug", "metrics", "admin"]
# Variables that Kubernetes sets for a service named vitrine, such as VITRINE_SERVICE_HOST and
# VITRINE_PORT_8000_TCP_ADDR.
_SERVICE_LINK = re.compile(r"VITRINE(_[A-Z0-9]+)*_(SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+)")

# An IPv6 address, with which words can begin: JSON cannot.
_IPV6 = re.compile(r"\s*\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]")


def _read_list(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith(("[", "{")) or _IPV6.match(value):
        return [word.strip() for word in value.split(",")]
    try:
        return parse_json(os.fsencode(value), has_unique_keys=True)
    except JsonError as error:
        raise ValueError(
            f'invalid JSON ({error}); a list is written as ["a", "b"], and objects in it as '
            '{"name": "a"}'
        ) from None


_Item = TypeVar("_Item")
# A list, which is JSON or words with commas. The library does not decode it, because it doubles the
# backslashes in options.
JsonList = Annotated[tuple[_Item, ...], NoDecode, BeforeValidator(_read_list)]


def _check_host(host: str) -> str:
    """Return the host in lower case: host names are case-insensitive."""
    host = host.lower()
    if not re.fullmatch(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?", host):
        raise ValueError(
            "must be a host as in the header Host, such as search.example, 127.0.0.1 or [::1], "
            "without scheme, path or wildcard"
        )
    return host


HostName = Annotated[str, Field(min_length=1), AfterValidator(_check_host)]


def _check_origin(origin: str) -> str:
    has_usual_port = re.fullmatch(r"https://.*:443|http://.*:80", origin)
    if has_usual_port or not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", origin):
        raise ValueError(
            "must be an origin as browsers send it, such as https://app.example: in lower case, "
            "without a wildcard, the usual port, or a slash at its end; or *"
        )
    return origin


Origin = Annotated[str, AfterValidator(_check_origin)]


def _check_device(name: str) -> str:
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:(0|[1-9][0-9]*))?", name):
        raise ValueError("must be auto, or a device of PyTorch such as cpu, cuda, cuda:1 or mps")
    return name


# Suffixes of OpenTelemetry's variables of TLS files. Without one of these files, all exports fail.
_TLS_FILES = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")

# Errors whose messages name types of Python.
_MESSAGES = {
    "tuple_type": "Input should be a list",
    "model_type": "Input should be an object",
    "path_type": "Input should be a path",
    "too_short": "must not be empty",
}


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _check_not_empty(cls, value: object, info: ValidationInfo) -> object:
        has_default = not cls.model_fields[str(info.field_name)].is_required()
        if value == "" and has_default:  # a path would be the working directory, a host all of them
            raise ValueError("must not be empty; to have the default, do not set it")
        return value

    @field_validator("*")
    @classmethod
    def _check_bits(cls, value: object) -> object:
        if isinstance(value, int) and value >= 2**63:  # orjson refuses those of more than 64 bits
            raise ValueError("must be less than 2**63")
        return value


class ServerSettings(_Group):
    """HTTP server: address, shutdown and logs."""

    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free port")
    hosts: JsonList[HostName] = Field(
        (), description="Host names accepted in the Host header; empty: all"
    )
    cors_origins: JsonList[Origin] = Field(
        (), description="Allowed CORS origins, such as `https://app.example`"
    )
    log: LogFormat = Field("text", description="Log format: `text` or `json`")
    drain_s: float = Field(
        5.0,
        ge=0,
        description="Seconds after SIGTERM during which requests are still served, while /readyz "
        "returns 503",
    )
    grace_s: int = Field(
        20,
        ge=0,
        description="Graceful shutdown timeout in seconds; requests in flight are aborted then",
    )
    access_log: bool = Field(False, description="Whether to log each request")
    slow_s: float = Field(
        1.0,
        gt=0,
        description="Duration in seconds above which the access log marks a request as slow",
    )
    gzip: bool = Field(
        False, description="Whether to compress responses for clients that accept gzip"
    )
    tei_at_root: bool = Field(
        False,
        description="Whether to serve the routes under /tei also at /; "
        "POST /rerank and GET /health are then TEI's",
    )
    page: bool = Field(True, description="Whether to serve the page of explanations at /debug")


# A path of a folder, a name of a package or a hub id; `service.model_cache` tells them apart.
ModelName = Annotated[Path, BeforeValidator(absolute_if_local)]


class ModelSettings(_Group):
    """The served model."""

    path: ModelName = Field(
        Path("artifacts/all-MiniLM-L6-v2"),
        description="Artifact, model folder, installed package, or hub id such as `org/name` or "
        "`org/name@revision`; `vitrine serve` and `explain` export all but an artifact, once",
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name of the served model; none: the artifact's name",
    )


class ServedModel(_Group):
    """One of several served models."""

    path: ModelName
    name: str | None = Field(None, min_length=1, max_length=256)
    aliases: tuple[str, ...] = ()
    precision: Precision | None = None
    share: float = Field(1.0, gt=0)


class ModelsSettings(_Group):
    """Several served models, in place of one."""

    folder: LocalPath | None = Field(
        None,
        description="Folder of artifacts, each of which is served under the name of its own "
        "folder; replaces `model.path`",
    )
    served: JsonList[ServedModel] = Field(
        (),
        description='Served models as JSON: `[{"path": "...", "name": "...", "aliases": '
        '["..."], "precision": "float32", "share": 1.0}]`, where only `path` is required; '
        "replaces `model.path`",
    )
    default: str | None = Field(
        None,
        description="Name of the model for requests that name none; none: the only model, or no "
        "model",
    )
    max_bytes: int = Field(
        0,
        ge=0,
        description="Maximum total size of the weights of loaded models, in bytes; models beyond "
        "it are loaded on demand, in place of the least recently used; 0: no limit",
    )
    load_s: float = Field(
        30.0, gt=0, description="Maximum time in seconds that a request waits for its model to load"
    )
    cache: LocalPath | None = Field(
        None,
        description="Folder in which exported models are kept; none: `vitrine` in "
        "`$XDG_CACHE_HOME`, or in `~/.cache`",
    )
    verify: LocalPath | None = Field(
        None,
        description="PEM file with the public key, or the certificate of it, that must have signed "
        "each artifact; no model is exported then; none: artifacts need no signature",
    )
    watch_s: float = Field(
        0.0,
        ge=0,
        description="Seconds between checks for new, changed and deleted artifacts; 0: only after "
        "SIGHUP",
    )


class EngineSettings(_Group):
    """Engine that runs the model's graph."""

    name: str = Field("auto", description="Name of the engine; `auto`: the first usable engine")
    precision: Precision = Field(
        "float32", description="Precision of the engine: `float32`, `float16`, `bfloat16` or `int8`"
    )
    threads: int = Field(
        0,
        ge=0,
        le=MAX_THREADS,
        description="Number of CPUs for a CPU engine, at most 16 per CPU of the machine; 0: all "
        "CPUs available to the process",
    )
    gpu: int = Field(0, ge=0, description="Index of the GPU for the engine `cuda`")
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds after which a running batch is cancelled and retried in halves; a "
        "batch may always take ten times its expected duration",
    )


class BatchSettings(_Group):
    """Batch size and queue size."""

    max_cost: int = Field(
        0,
        ge=0,
        description="Maximum cost of a batch, in tokens: its tokens plus the cost of attention; 0: "
        "the engine's default",
    )
    max_queue_tokens: int = Field(
        1_000_000,
        ge=1,
        description="Maximum number of queued tokens of a model and priority; requests beyond it "
        "get 429",
    )


class CacheSettings(_Group):
    """Cache of results."""

    max_bytes: int = Field(
        0,
        ge=0,
        description="Maximum size of the cached vectors, sparse vectors and logits, in bytes; 0: "
        "no cache",
    )


class LimitSettings(_Group):
    """Limits of a request."""

    max_inputs: int = Field(
        2048,
        ge=1,
        description="Maximum number of inputs per request, of their chunks, and of their pairs "
        "with candidate labels",
    )
    max_chars: int = Field(100_000, ge=1, description="Maximum number of characters per text")
    max_token_vectors: int = Field(
        16_384,
        ge=1,
        description="Maximum number of tokens per request with results per token: token lists, "
        "token vectors, multi-vectors, tags, late chunking and `terms` of embeddings; also of "
        "entities with labels of the request",
    )
    max_body_bytes: int = Field(
        4 * 2**20, ge=1, description="Maximum size of a request body in bytes"
    )
    max_bodies_bytes: int = Field(
        64 * 2**20,
        ge=1,
        description="Maximum total size in bytes of all request bodies over 64 KiB that are being "
        "read; requests beyond it get 429",
    )
    body_s: float = Field(30.0, gt=0, description="Timeout for reading a request body, in seconds")
    request_s: float = Field(
        120.0,
        gt=0,
        description="Deadline of a request in seconds; a client can shorten it with "
        "X-Request-Timeout-Ms",
    )


class DebugSettings(_Group):
    """Gradient routes under /debug."""

    enabled: bool = Field(False, description="Whether the routes under /debug are enabled")
    device: Annotated[str, AfterValidator(_check_device)] = Field(
        "auto", description="Device for gradients, such as `auto`, `cpu`, `cuda` or `cuda:1`"
    )
    hosts: JsonList[HostName] = Field(
        ("localhost", "127.0.0.1", "[::1]"),
        description="Host names accepted in the Host header by the routes under /debug",
    )
    max_tokens: int = Field(
        256,
        ge=3,
        description="Maximum number of tokens per text or pair of texts of a gradient request",
    )
    max_token_steps: int = Field(
        131_072,
        ge=1,
        description="Maximum cost of a gradient request: tokens that run through the model, summed "
        "over all its evaluations",
    )
    max_activation_bytes: int = Field(
        16_777_216,
        ge=1,
        le=2**30,  # the size of a frame from the gradient process is an integer of four bytes
        description="Maximum size in bytes of the tensors of a request for activations",
    )
    max_waiting: int = Field(4, ge=0, description="Maximum number of queued gradient requests")
    deadline_s: float = Field(
        60.0, gt=0, description="Seconds after which a gradient job is aborted"
    )
    full_gradients: bool = Field(False, description="Whether /debug/vjp may return full gradients")
    max_jobs: int = Field(
        1000, ge=1, description="Number of jobs after which the gradient process is restarted"
    )


def _check_key(key: SecretStr) -> SecretStr:
    # Only characters that a header can carry. A trailing newline is a common mistake.
    if not re.fullmatch(r"[!-~]{16,}", key.get_secret_value()):
        raise ValueError("a key must have at least 16 printable ASCII characters and no spaces")
    return key


class ApiKey(_Group):
    """An API key and its scopes."""

    name: str = Field(min_length=1)
    key: Annotated[SecretStr, AfterValidator(_check_key)]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)] = ("encode",)


class AuthSettings(_Group):
    """API keys. If there are none, everybody has access."""

    keys: JsonList[ApiKey] = Field(
        (), description='API keys as JSON: `[{"name": "...", "key": "...", "scopes": ["encode"]}]`'
    )
    keys_file: LocalPath | None = Field(
        None,
        description="File with API keys, such as a mounted secret, as JSON in the format of "
        "`auth.keys`; SIGHUP reads it again",
    )

    def all_keys(self) -> tuple[ApiKey, ...]:
        """Return the API keys of `keys` and of `keys_file` together.

        Raises:
            OSError: The keys file cannot be read.
            ValueError: The keys file is invalid, without any key, or writable by everybody, or two
                keys are equal.
        """
        keys = self.keys
        if self.keys_file is not None:
            keys += _read_keys(self.keys_file)
            if not keys:  # everybody would have access
                raise ValueError(f"auth.keys_file: {self.keys_file} has no API key")
        if len({key.key.get_secret_value() for key in keys}) < len(keys):
            raise ValueError("two API keys are equal; every key must be unique")
        return keys


def _read_keys(file: Path) -> tuple[ApiKey, ...]:
    # May be readable by others: Docker and Kubernetes mount secrets with mode 0444 or 0644.
    try:
        if file.stat().st_mode & stat.S_IWOTH:
            raise ValueError(f"auth.keys_file: {file} is writable by others; run chmod o-w on it")
        content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
        keys = parse_json(content, has_unique_keys=True)
        return TypeAdapter(tuple[ApiKey, ...]).validate_python(keys)
    except OSError as error:
        raise OSError(f"auth.keys_file: {file} cannot be read: {error.strerror}") from None
    except JsonError as error:
        raise ValueError(f"auth.keys_file: {file}: Invalid JSON: {error}") from None
    except ValidationError as error:
        raise ValueError(f"auth.keys_file: {file}: {next(problems(error, 'keys'))}") from None


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
        cli_parse_none_str="not set",  # the default would be a word that a user may type
        hide_input_in_errors=True,
    )

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    models: ModelsSettings = ModelsSettings()
    engine: EngineSettings = EngineSettings()
    batch: BatchSettings = BatchSettings()
    cache: CacheSettings = CacheSettings()
    limits: LimitSettings = LimitSettings()
    auth: AuthSettings = AuthSettings()
    debug: DebugSettings = DebugSettings()

    def model_specs(self) -> list[ModelSpec]:
        """Return the models to serve.

        Raises:
            ValueError: Two of `models.folder`, `models.served` and `model.name` are set.
            ArtifactError: `models.folder` has no artifact, or an invalid one.
        """
        options = self.model_options()
        if self.models.folder is not None and self.models.served:
            raise ValueError("models.folder and models.served are mutually exclusive")
        if self.model.name is not None and (self.models.folder is not None or self.models.served):
            raise ValueError("model.name is the name of model.path alone; there are several models")
        if self.models.folder is not None:
            return specs_in(self.models.folder, options)
        single = ServedModel(path=self.model.path, name=self.model.name)
        return [
            ModelSpec(
                path=model.path,
                aliases=model.aliases,
                options=replace(
                    options,
                    name=model.name,
                    precision=model.precision or options.precision,
                    share=model.share,
                ),
            )
            for model in self.models.served or (single,)
        ]

    def model_options(self) -> ModelOptions:
        """Return the runtime options of a model."""
        return ModelOptions(
            engine=self.engine.name,
            precision=self.engine.precision,
            threads=self.engine.threads,
            gpu=self.engine.gpu,
            run_timeout_s=self.engine.timeout_s,
            max_cost=self.batch.max_cost,
            max_queue_tokens=self.batch.max_queue_tokens,
            max_chars=self.limits.max_chars,
            max_token_vectors=self.limits.max_token_vectors,
            max_chunks=self.limits.max_inputs,
            verify=self.models.verify,
        )


def traces_endpoint() -> str | None:
    """Return the URL to which OpenTelemetry's environment variables export traces; None: nowhere.

    Raises:
        ValueError: A variable selects an exporter or a protocol other than OTLP over HTTP, or a
            certificate or key that cannot be read, or the endpoint is not a URL.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or ""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or ""
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
    source = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" if endpoint else "OTEL_EXPORTER_OTLP_ENDPOINT"
    if not endpoint and (base or exporter == "otlp"):
        endpoint = f"{(base or 'http://localhost:4318').rstrip('/')}/v1/traces"
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not endpoint or is_disabled or exporter == "none":
        return None
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    values = {"OTEL_TRACES_EXPORTER": "otlp"} | dict.fromkeys(protocols, "http/protobuf")
    for name, supported in values.items():
        if os.environ.get(name, supported) not in ("", supported):
            raise ValueError(f"{name}: the only supported value is {supported}")
    if not re.match(r"https?://[^/]", endpoint):
        raise ValueError(f"{source} must be a URL, such as http://localhost:4318")
    for file in _TLS_FILES if endpoint.startswith("https") else ():
        names = (f"OTEL_EXPORTER_OTLP_TRACES_{file}", f"OTEL_EXPORTER_OTLP_{file}")
        variable = next(filter(os.environ.get, names), None)  # the first one applies
        if variable and not os.access(os.environ[variable], os.R_OK):
            raise ValueError(f"{variable}: {os.environ[variable]} cannot be read")
    return endpoint


def problems(error: ValidationError, root: str = "settings") -> Iterator[str]:
    """Yield a sentence about each invalid setting, which begins with its name, or with `root`."""
    for problem in error.errors(include_url=False, include_input=False):
        where = ".".join(map(str, problem["loc"])) or root
        message = problem["msg"].removeprefix("Value error, ")
        yield f"{where}: {_MESSAGES.get(problem['type'], message)}"


def table() -> list[tuple[str, str, str]]:
    """Return the group, name and description of every setting."""
    rows: list[tuple[str, str, str]] = []
    for group, outer in Settings.model_fields.items():
        fields = type(outer.default).model_fields
        rows += [(group, name, field.description or "") for name, field in fields.items()]
    return rows


def variable(group: str, name: str) -> str:
    """Return the name of the environment variable of a setting."""
    return f"VITRINE_{group}__{name}".upper()


def from_command_line(
    arguments: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> Settings:
    """Return the settings from environment variables, overridden by the options in `arguments`.

    Args:
        arguments: Arguments of the command line.
        parser: Parser with further options, which gets those of the settings; None: a new one.

    Raises:
        ValueError: An environment variable looks like a misspelt setting, an option is a group of
            settings, or a value is invalid or nested too deeply.
        SystemExit: `--help` was requested, or an option is unknown.
    """
    known = {variable(group, name) for group, name, _ in table()}
    for name in ignored_variables():
        _check_variable(name, known)
    for argument in arguments:
        check_depth(os.fsencode(argument))
        group = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and group in Settings.model_fields:  # it would take JSON
            options = ", ".join(f"--{group}.{name}" for own, name, _ in table() if own == group)
            raise ValueError(f"--{group} is not a setting; those of its group are {options}")
    parser = parser or argparse.ArgumentParser("vitrine-serve")
    source = CliSettingsSource[Any](Settings, cli_parse_args=list(arguments), root_parser=parser)
    return Settings(_cli_settings_source=source)


def ignored_variables() -> list[str]:
    """Return the environment variables whose names begin like a setting's, and which are none."""
    known = {variable(group, name) for group, name, _ in table()}
    return [
        name
        for name in sorted(os.environ.keys() - known)
        if name.startswith("VITRINE_") and not _is_service_link(name, os.environ[name])
    ]


def _is_service_link(name: str, value: str) -> bool:
    """Return whether the variable looks like one that Kubernetes sets for a service."""
    return bool(_SERVICE_LINK.fullmatch(name)) or value.startswith(("tcp://", "udp://"))


def _check_variable(name: str, known: Collection[str]) -> None:
    """Raise a ValueError if an unknown variable looks like a misspelt setting."""
    similar = get_close_matches(name, known, n=1, cutoff=0.9)
    in_group = sorted(other for other in known if other.startswith(f"{name}__"))
    if in_group:  # pydantic would read the whole group from it
        raise ValueError(f"{name} is not a setting; those of its group are {', '.join(in_group)}")
    if "__" in name or similar:
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise ValueError(f"{name} is not a setting{hint}; vitrine-serve --help lists all settings")
