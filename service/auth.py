"""API keys with scopes. Keys are compared in constant time and kept as digests only."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from service.errors import Forbidden, Unauthorized
from service.settings import ApiKey, Scope


@dataclass(frozen=True)
class _Known:
    digest: bytes
    scopes: frozenset[Scope]


class KeyRing:
    """The keys that open the service; an empty ring opens everything."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._known = [
            _Known(_digest(key.key.get_secret_value()), frozenset(key.scopes)) for key in keys
        ]

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._known

    def require(self, key: str | None, scope: Scope) -> None:
        """Let a request pass, or not.

        Args:
            key: What the request brings, if anything.
            scope: What the route needs.

        Raises:
            Unauthorized: There is no key, or it is not known.
            Forbidden: The key does not have the scope.
        """
        if self.is_open:
            return
        if key is None:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        digest = _digest(key)
        # Every key is compared, whichever fits, so that the time taken tells nothing.
        matches = [known for known in self._known if hmac.compare_digest(known.digest, digest)]
        if not matches:
            raise Unauthorized("this API key is not known")
        if scope not in matches[0].scopes:
            raise Forbidden(f"this API key does not have the scope {scope}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
