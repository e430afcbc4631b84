"""Taps: observers of the steps of the forward pass.

The network passes every step, with its name, to a tap that runs it. The default tap does nothing
else. Gradient flow, layer parity and norm traces use their own taps on the same forward pass.
"""

from collections.abc import Callable

from torch import Tensor, nn

from models.add_layer_norm import AddLayerNorm


class Tap:
    """Runner of the steps of a forward pass. Subclasses observe or change them.

    Step names are "embeddings.words", "embeddings.positions", "embeddings.norm", "relative_bias",
    "layers.0.attention", "layers.0.norm1", "layers.0.linear1", "layers.0.linear2",
    "layers.0.norm2" and so on, "final_norm", "pooling", "heads.0". A pre-norm layer ends in
    "layers.0.sum2".
    """

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)`.

        Args:
            name: Name of the step.
            module: Module of the step's parameters; None without parameters.
            function: Computation of the step.
            inputs: Outputs of earlier steps.
        """
        return function(*inputs)

    def add_norm(
        self, sum_name: str, name: str, norm: AddLayerNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and the sum, both shaped as `x`.

        Args:
            sum_name: Name of the sum, for taps with separate steps for sum and norm.
            name: Name of the norm.
            norm: The fused norm.
            x: Output of a sublayer.
            residual: Input of the sublayer.
        """
        return norm.with_sum(x, residual)


NO_TAP = Tap()


class OutputTap(Tap):
    """Recorder of the output of every step, in order.

    Attributes:
        outputs: Outputs, by step name.
    """

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)` and record it."""
        self.outputs[name] = super().step(name, module, function, *inputs)
        return self.outputs[name]

    def add_norm(
        self, sum_name: str, name: str, norm: AddLayerNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and the sum; record the former."""
        y, total = super().add_norm(sum_name, name, norm, x, residual)
        self.outputs[name] = y
        return y, total


class NormTap(Tap):
    """Recorder of the inputs of every norm, in order.

    Attributes:
        calls: Norm, `x` and residual by step name; the residual is None for a norm without one.
    """

    def __init__(self) -> None:
        self.calls: dict[str, tuple[nn.LayerNorm, Tensor, Tensor | None]] = {}

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)`; record the input of a norm."""
        if isinstance(module, nn.LayerNorm):
            self.calls[name] = (module, inputs[0], None)
        return super().step(name, module, function, *inputs)

    def add_norm(
        self, sum_name: str, name: str, norm: AddLayerNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and the sum; record the inputs."""
        self.calls[name] = (norm, x, residual)
        return super().add_norm(sum_name, name, norm, x, residual)
