"""Peers: embedding servers that run already, of which only the URL is known."""

import argparse
import http.client
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.servers import Load, drive
from tests.benchmarks.workloads import Workload

# text-embeddings-inference refuses requests of more texts, by default.
_MAX_TEXTS = 32
_TIMEOUT_S = 60


class ComparisonError(Exception):
    """A server does not answer, has no known route, fails requests or returns other vectors."""


@dataclass(frozen=True)
class _Shape:
    """Route of an API and where its requests get the model's name.

    Attributes:
        field: JSON field with the texts.
        models: Route that lists the models, for requests that name one.
    """

    path: str
    field: str
    models: str | None = None


# TEI answers in both shapes. infinity has the OpenAI routes without `/v1` by default.
_SHAPES = (
    _Shape("/embed", "inputs"),
    _Shape("/v1/embeddings", "input", "/v1/models"),
    _Shape("/embeddings", "input", "/models"),
)


class Peer:
    """A running peer. Its process is unknown: it is never suspended, and has no CPU time.

    Args:
        name: Name in tables and errors.
        url: Base URL, `http://host:port` with an optional path.

    Raises:
        ComparisonError: the peer does not answer, or has none of the known routes.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url.rstrip("/")
        self._shape, self._fields = self._find_shape()

    @property
    def route(self) -> str:
        """URL of the route that encodes."""
        return self._url + self._shape.path

    def _find_shape(self) -> tuple[_Shape, Mapping[str, str]]:
        """Return the first API that answers, and the fields of its requests besides the texts."""
        tried: list[str] = []
        for shape in _SHAPES:
            fields: dict[str, str] = {}
            if shape.models is not None:
                status, content = self._request("GET", shape.models)
                model = _first_model(content) if status == 200 else None
                if model is None:
                    tried.append(f"GET {shape.models}: no models, status {status}")
                    continue
                fields["model"] = model
            status, content = self._request("POST", shape.path, {shape.field: ["ready?"], **fields})
            if status == 200 and _vectors(content) is not None:
                return shape, fields
            tried.append(f"POST {shape.path}: no vectors, status {status}")
        raise ComparisonError(
            f"peer {self.name!r} at {self._url} has no known embedding route; tried "
            + "; ".join(tried)
        )

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> tuple[int, bytes]:
        parts = urlsplit(self._url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            content = None if body is None else json.dumps(body)
            connection.request(method, parts.path + path, content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ComparisonError(
                f"peer {self.name!r} does not answer at {self._url}: {error!r}"
            ) from error
        finally:
            connection.close()

    def bodies(self, requests: Sequence[Sequence[str]]) -> list[str]:
        """Return the JSON body of each request."""
        return [json.dumps({self._shape.field: texts, **self._fields}) for texts in requests]

    def encode(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the vectors of the texts, (N, W).

        Raises:
            ComparisonError: the peer does not answer, or not with one vector per text.
        """
        return np.concatenate(list(self._encode_parts(texts)))

    def _encode_parts(self, texts: Sequence[str]) -> Iterator[NDArray[np.float64]]:
        for start in range(0, len(texts), _MAX_TEXTS):
            part = texts[start : start + _MAX_TEXTS]
            status, content = self._request(
                "POST", self._shape.path, {self._shape.field: part, **self._fields}
            )
            vectors = _vectors(content) if status == 200 else None
            if vectors is None or len(vectors) != len(part):
                raise ComparisonError(
                    f"peer {self.name!r} did not return {len(part)} vectors from {self.route}: "
                    f"status {status}, {content[:200]!r}"
                )
            yield vectors

    def load(self, workload: Workload, seconds: int) -> Load:
        """Drive the workload with wrk.

        Raises:
            ComparisonError: the peer does not answer afterwards.
        """
        bodies = self.bodies(workload.requests())
        figures = drive(self.route, bodies, workload.clients, seconds)
        self.encode(["the requests that wrk abandoned precede this one in the queue"])
        return Load(**figures, cpu_s=math.nan)


def _first_model(content: bytes) -> str | None:
    """Return the name of the first model of an OpenAI list of models."""
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        return None


def _vectors(content: bytes) -> NDArray[np.float64] | None:
    """Return the vectors of a response in TEI's or OpenAI's shape, (N, W), or None."""
    try:
        payload = json.loads(content)
        if isinstance(payload, dict):
            entries = sorted(payload["data"], key=lambda entry: int(entry["index"]))
            payload = [entry["embedding"] for entry in entries]
        vectors = np.asarray(payload, np.float64)
    except (ValueError, TypeError, LookupError):
        return None
    return vectors if vectors.ndim == 2 else None


def parse_peers(text: str) -> dict[str, str]:
    """Return the URLs of `NAME=URL[,NAME=URL...]` by name.

    Raises:
        argparse.ArgumentTypeError: an entry is not of this form, its URL is not of HTTP, or a name
            occurs twice.
    """
    urls: dict[str, str] = {}
    for entry in text.split(","):
        name, _, url = entry.partition("=")
        if not re.fullmatch(r"\w[\w .-]*", name):
            raise argparse.ArgumentTypeError(f"{entry!r} is not NAME=URL")
        if urlsplit(url).scheme != "http" or not urlsplit(url).netloc:
            raise argparse.ArgumentTypeError(f"the URL of peer {name!r} must be http://host:port")
        if name in urls:
            raise argparse.ArgumentTypeError(f"there are two peers {name!r}")
        urls[name] = url
    return urls
