"""Taps: objects that run the steps of a forward pass and can record or change them.

The network passes every step, with its name, to a tap. The default tap only runs the step. Gradient
flow, layer parity and norm traces run the same forward pass with other taps.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from models.network.attention import LayerInputs, SelfAttention
from models.network.norms import AddNorm, Norm


class Tap:
    """Default tap, which only runs each step. Subclasses record or change the steps.

    Step names are "embeddings.words", "embeddings.types", "embeddings.positions",
    "embeddings.norm", "embeddings.projection", "relative_bias", "distance_embeddings",
    "layers.0.attention", "layers.0.norm1", "layers.0.gate", "layers.0.linear1",
    "layers.0.product", "layers.0.linear2", "layers.0.norm2" and so on, "final_norm", "pooling",
    "heads.0". A model has only the steps of its parts. Some models also have
    "layers.0.branch_norm1" and "layers.0.branch_norm2". A layer with experts has
    "layers.1.experts" instead of the steps of the feed-forward layer. The last step of a pre-norm
    layer is "layers.0.sum2". Sums that are fused with a norm are "embeddings.sum", "layers.0.sum1",
    "layers.0.sum2" and "layers.0.branch_sum1".
    """

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)`.

        Args:
            name: Name of the step.
            module: Module with the parameters of the step; None if it has none.
            function: Computation of the step.
            inputs: Arguments of `function`, outputs of earlier steps.
        """
        return function(*inputs)

    def attention(
        self, name: str, attention: SelfAttention, x: Tensor, inputs: LayerInputs
    ) -> Tensor:
        """Return `attention(x, inputs)`. Subclasses can split attention into several steps.

        Args:
            name: Step name of the attention.
            attention: Module that computes the attention.
            x: Token vectors, the output of an earlier step.
            inputs: Inputs besides the token vectors. `inputs.outputs` can be outputs of earlier
                steps.
        """

        def run(x: Tensor, *others: Tensor) -> Tensor:
            return attention(x, inputs.with_outputs(others))

        return self.step(name, attention, run, x, *inputs.outputs)

    def add_norm(
        self, sum_name: str, name: str, norm: AddNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and `x + residual`, both shaped as `x`.

        Args:
            sum_name: Step name of the sum, for subclasses that run sum and norm as two steps.
            name: Step name of the norm.
            norm: Module that computes the sum and its norm.
            x: Output of a sublayer.
            residual: Input of the sublayer.
        """
        return norm.with_sum(x, residual)


NO_TAP = Tap()


class OutputTap(Tap):
    """Tap that records the outputs of steps, sums that are fused with a norm included.

    Args:
        names: Names of the recorded steps; None: all.
        reduce: Function of an output, whose result is recorded in its place.

    Attributes:
        outputs: Output of each recorded step, by step name, in order of execution.
    """

    def __init__(
        self,
        names: Collection[str] | None = None,
        reduce: Callable[[Tensor], Tensor] = lambda output: output,
    ) -> None:
        self.names = names
        self.reduce = reduce
        self.outputs: dict[str, Tensor] = {}

    def _record(self, name: str, output: Tensor) -> None:
        if self.names is None or name in self.names:
            self.outputs[name] = self.reduce(output)

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)` and record it as the output of the step."""
        output = super().step(name, module, function, *inputs)
        self._record(name, output)
        return output

    def add_norm(
        self, sum_name: str, name: str, norm: AddNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and `x + residual`; record both."""
        y, total = super().add_norm(sum_name, name, norm, x, residual)
        self._record(sum_name, total)
        self._record(name, y)
        return y, total


class PatchTap(Tap):
    """Tap that changes the output of one step.

    Args:
        name: Name of the step.
        change: Returns the changed output.
    """

    def __init__(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self.name = name
        self.change = change

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)`, changed if it is the output of the step."""
        output = super().step(name, module, function, *inputs)
        return self.change(output) if name == self.name else output

    def add_norm(
        self, sum_name: str, name: str, norm: AddNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and `x + residual`; change the one that is the step's."""
        if sum_name == self.name:
            total = self.change(x + residual)
            return norm(total, torch.zeros_like(total)), total
        y, total = super().add_norm(sum_name, name, norm, x, residual)
        return (self.change(y) if name == self.name else y), total


class NormTap(Tap):
    """Tap that records the inputs of every norm of token vectors.

    The norms of queries, keys, distance embeddings and heads are not recorded.

    Attributes:
        calls: Norm module, input `x` and residual of each norm, by step name, in order of
            execution. The residual is None for a norm without residual addition.
    """

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Norm | AddNorm, Tensor, Tensor | None]] = {}

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)`; if `module` is a norm, record its input."""
        if isinstance(module, Norm):
            self.calls[name] = (module, inputs[0], None)
        return super().step(name, module, function, *inputs)

    def add_norm(
        self, sum_name: str, name: str, norm: AddNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and `x + residual`; record `norm`, `x` and `residual`."""
        self.calls[name] = (norm, x, residual)
        return super().add_norm(sum_name, name, norm, x, residual)
