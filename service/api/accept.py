"""Content negotiation by the headers Accept and Accept-Encoding: RFC 9110, 12.5."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from fastapi import Request

from service.api.headers import header

# An element of a list. Quoted strings may have commas. The last one may be unterminated: to search
# for an end again and again would take quadratic time.
_ELEMENT = re.compile(r'(?:[^",]|"(?:[^"\\]|\\.)*+(?:"|\\?\Z))++')
_WEIGHT = re.compile(r"q=(0(?:\.\d*)?|1(?:\.0*)?)")
# Ignored parameters of media types. A range with another parameter matches nothing here.
_IGNORED = re.compile("(?:charset|version|escaping)=")


def preferred_type(request: Request, offers: tuple[str, ...]) -> str:
    """Return the offered media type that the client prefers; see `preferred`."""
    return best_offer(header(request, "accept") or "", offers)


@lru_cache(maxsize=64)  # clients send few different headers, and parsing takes 5 us
def best_offer(accept: str, offers: tuple[str, ...]) -> str:
    """Return the offered media type that an Accept header prefers.

    A media type has the weight of the most specific range that matches it. Of equal weights, a type
    that the header names counts more than one that it does not, and then a later offer more than an
    earlier one.

    Args:
        accept: The header; "" stands for a request without it.
        offers: Media types, of which the first is the default: it is returned if the header is
            empty or accepts none of them.
    """
    ranges = _weights(accept)
    best, best_key = offers[0], (0.0, 0)
    for rank, offer in enumerate(offers, 1):
        quality = _quality(offer, ranges)
        key = quality, rank if offer in ranges else 0
        if quality and key > best_key:
            best, best_key = offer, key
    return best


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding header has gzip, and prefers nothing uncompressed.

    Args:
        accept_encoding: The header; "" stands for a request without it.
    """
    weights = _weights(accept_encoding)
    gzip = weights.get("gzip", weights.get("*", 0.0))
    return gzip > 0 and gzip >= weights.get("identity", 0.0)


def _quality(offer: str, ranges: Mapping[str, float]) -> float:
    """Return the weight of the most specific range that matches the media type, or else 0."""
    kind = offer.partition("/")[0]
    return next((ranges[name] for name in (offer, f"{kind}/*", "*/*") if name in ranges), 0.0)


def _weights(header: str) -> dict[str, float]:
    """Return the weight of each name in a list header, in lower case.

    Of equal names, the highest weight counts.
    """
    weights: dict[str, float] = {}
    for element in _ELEMENT.findall(header.lower()):
        name, *parameters = (part.strip() for part in element.split(";"))
        weight = _weight(parameters)
        if weight is not None:
            weights[name] = max(weight, weights.get(name, 0.0))
    return weights


def _weight(parameters: Iterable[str]) -> float | None:
    """Return the weight (`q`) among the parameters; None: the element does not count."""
    for parameter in parameters:
        if parameter.startswith("q="):  # parameters after it are extensions of the header
            match = _WEIGHT.fullmatch(parameter)
            return float(match[1]) if match else None
        if parameter and not _IGNORED.match(parameter):
            return None
    return 1.0
