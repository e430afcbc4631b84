"""The small rerankers, classifiers and sparse encoders of the tests of the other routes."""

from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    cross_encoder,
    reranker,
    sparse_encoder,
)
