"""API keys with scopes. They are compared in constant time, and kept only as SHA-256 digests."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from service.api.errors import Forbidden, Unauthorized
from service.settings import ApiKey, Scope


@dataclass(frozen=True)
class HashedKey:
    """An API key as its SHA-256 digest, with its scopes."""

    name: str
    digest: bytes
    scopes: frozenset[Scope]

    @property
    def is_bulk_only(self) -> bool:
        """Whether requests with this key have the priority "bulk"."""
        return "encode" not in self.scopes


class KeyRing:
    """The API keys of the service. If there are none, requests need no key."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [
            HashedKey(key.name, _digest(key.key.get_secret_value()), frozenset(key.scopes))
            for key in keys
        ]

    @property
    def is_open(self) -> bool:
        """Whether requests need no API key, because no keys are configured."""
        return not self._keys

    def require(self, key: str | None, scope: Scope) -> HashedKey:
        """Check the API key of a request and return it. The scope "bulk" is enough for "encode".

        Args:
            key: API key of the request; None: the request has no API key.
            scope: Scope that the route requires.

        Raises:
            Unauthorized: The key is missing or unknown.
            Forbidden: The key lacks the scope.
        """
        if key is None:
            raise Unauthorized("an API key is required; send the header Authorization: Bearer KEY")
        digest = _digest(key)
        # Every key is compared, even after a match, so that the duration reveals nothing.
        matches = [known for known in self._keys if hmac.compare_digest(known.digest, digest)]
        if not matches:
            raise Unauthorized("the API key is unknown")
        accepted = {scope, "bulk"} if scope == "encode" else {scope}
        if accepted.isdisjoint(matches[0].scopes):
            raise Forbidden(f"the API key lacks the scope {scope}")
        return matches[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
