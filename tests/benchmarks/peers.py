"""Peers: embedding servers that run already, whose API is found by trying."""

import argparse
import json
import re
from urllib.parse import urlsplit

from tests.benchmarks.comparison import BenchmarkError
from tests.benchmarks.servers import Api, Client

# Route, field of the texts, and route of the models for requests that name one. TEI answers in the
# first two shapes. infinity has the OpenAI routes without `/v1` by default.
_SHAPES = (
    ("/embed", "inputs", None),
    ("/v1/embeddings", "input", "/v1/models"),
    ("/embeddings", "input", "/models"),
)


def find_peer(name: str, url: str) -> Client:
    """Return a client of the first API that the peer answers in.

    Raises:
        BenchmarkError: the peer does not answer, or has none of the known routes.
    """
    tried: list[str] = []
    for path, field, models in _SHAPES:
        try:
            fields = {} if models is None else {"model": _first_model(url, models)}
            peer = Client(url, Api(path, field, fields))
            peer.encode(["ready?"])
        except BenchmarkError as error:
            tried.append(str(error))
        else:
            return peer
    raise BenchmarkError(f"peer {name!r} has no known embedding route; tried {'; '.join(tried)}")


def _first_model(url: str, path: str) -> str:
    """Return the name of the first model of an OpenAI list of models."""
    status, content = Client(url, Api()).request("GET", path)
    try:
        if status == 200:
            return str(json.loads(content)["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        pass
    raise BenchmarkError(f"GET {url}{path}: no models, status {status}")


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
