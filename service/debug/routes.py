"""The gradient routes: one module per question."""

from service.debug import activations, attribute, flow, layer_norm, pair, parity, patch, vjp
from service.debug.pipeline.route import gradient_router

ROUTES = (
    attribute.ROUTE,
    pair.ROUTE,
    flow.ROUTE,
    layer_norm.ROUTE,
    parity.ROUTE,
    vjp.ROUTE,
    activations.ROUTE,
    patch.ROUTE,
)

router = gradient_router()
for route in ROUTES:
    route.add_to(router)
