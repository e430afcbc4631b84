"""Request models of the gradient routes, by subject."""

from service.debug.request_models.attribution import AttributeRequest, PairRequest, VjpRequest
from service.debug.request_models.flow import FlowRequest
from service.debug.request_models.layer_norm import LayerNormRequest
from service.debug.request_models.parity import ParityRequest
from service.debug.request_models.taps import ActivationsRequest, PatchRequest

BODIES = (
    AttributeRequest,
    PairRequest,
    FlowRequest,
    LayerNormRequest,
    ParityRequest,
    VjpRequest,
    ActivationsRequest,
    PatchRequest,
)
