"""The gradient routes: one module per question."""

from service.debug import (
    activations,
    attribute,
    capabilities,
    flow,
    layer_norm,
    pair,
    parity,
    patch,
    vjp,
)

ROUTERS = (
    attribute.router,
    pair.router,
    flow.router,
    layer_norm.router,
    parity.router,
    vjp.router,
    capabilities.router,
    activations.router,
    patch.router,
)
# Models of the request bodies.
BODIES = (
    attribute.AttributeRequest,
    pair.PairRequest,
    flow.FlowRequest,
    layer_norm.LayerNormRequest,
    parity.ParityRequest,
    vjp.VjpRequest,
    activations.ActivationsRequest,
    patch.PatchRequest,
)
