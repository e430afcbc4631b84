"""The small models of other kinds of the tests of the other routes."""

from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    cross_encoder,
    multi_encoder,
    reranker,
    sparse_encoder,
)
