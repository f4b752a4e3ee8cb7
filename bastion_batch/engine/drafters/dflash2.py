"""DFlash 2: DFlash with short causal convolutions inside the block and a candidate selector.

Around each sublayer, its normed input u and its output are convolved along the block:

    out[w] = sum over c < C of (base[c] + dynamic[w, c]) * x[w - c]

with x[w - c] zero before the block. The dynamic coefficients of both are a projection of u and
shared by the channels of a group. The context is never convolved: its keys and values are computed
as in DFlash.

Shape letters: R rows, W block width, S = R * W packed slots, E hidden size, C convolution taps,
G groups of channels, P parents, K candidates.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from bastion_batch.engine.attention import Attends
from bastion_batch.engine.drafters.description import BlockConvolutions, DrafterDescription
from bastion_batch.engine.drafters.dflash import Drafted
from bastion_batch.engine.drafters.selector import CandidateSelector
from bastion_batch.engine.drafters.transitions import TransitionDrafter
from bastion_batch.engine.linear import Linear
from bastion_batch.engine.target import Target


class Convolved(NamedTuple):
    """A sublayer's input, and what its output is to be convolved with."""

    input_SE: Tensor
    output_SCG: Tensor
    """Dynamic coefficients."""


class BlockConvolution:
    """The pair of convolutions around a sublayer.

    Args:
        sizes: of both.
        base_2CE: static coefficients, of input and output.
        projection: weight of the dynamic ones.
    """

    def __init__(self, sizes: BlockConvolutions, base_2CE: Tensor, projection: Tensor) -> None:
        self._num_taps = sizes.num_taps
        self._base_2CGg = base_2CE.unflatten(-1, (-1, sizes.group_size))
        self._project = Linear(projection)

    def before(self, normed_SE: Tensor, width: int) -> Convolved:
        """Convolve a sublayer's input."""
        dynamic_S2CG = self._project(normed_SE).unflatten(-1, (2, self._num_taps, -1))
        convolved = self._convolve(0, normed_SE, dynamic_S2CG[:, 0], width)
        return Convolved(convolved, dynamic_S2CG[:, 1])

    def after(self, output_SE: Tensor, convolved: Convolved, width: int) -> Tensor:
        """Convolve the sublayer's output."""
        return self._convolve(1, output_SE, convolved.output_SCG, width)

    def _convolve(self, side: int, x_SE: Tensor, dynamic_SCG: Tensor, width: int) -> Tensor:
        base_CGg = self._base_2CGg[side]
        x_RWGg = x_SE.view(-1, width, *base_CGg.shape[1:])
        kernel_RWCGg = (dynamic_SCG[..., None] + base_CGg).unflatten(0, (-1, width))
        out = kernel_RWCGg[:, :, 0] * x_RWGg
        for tap in range(1, min(self._num_taps, width)):
            out[:, tap:].addcmul_(kernel_RWCGg[:, tap:, tap], x_RWGg[:, :-tap])
        return out.view_as(x_SE)


class _LayerConvolutions(NamedTuple):
    attention: BlockConvolution
    mlp: BlockConvolution


class DFlash2Drafter(TransitionDrafter):
    """A DFlash 2 checkpoint bound to its target; see `DFlashDrafter`."""

    def __init__(
        self, description: DrafterDescription, tensors: Mapping[str, Tensor], target: Target
    ) -> None:
        super().__init__(description, tensors, target)
        sizes, selector = description.convolutions, description.selector
        assert sizes is not None, "a DFlash 2 checkpoint has convolutions"
        assert selector is not None, "and a selector"
        self._num_ranks = selector.num_candidates
        self._selector = CandidateSelector(tensors)

        def convolution(number: int, name: str) -> BlockConvolution:
            prefix = f"layers.{number}.{name}_conv."
            projection = tensors[f"{prefix}kernel_projection.weight"]
            return BlockConvolution(sizes, tensors[f"{prefix}base_kernel"], projection)

        self._convolutions = [
            _LayerConvolutions(convolution(number, "attention"), convolution(number, "mlp"))
            for number in range(description.num_layers)
        ]

    def transitions(self, drafted: Drafted, parents_SP: Tensor) -> Tensor:
        """By the selector, normalised over the slot's candidates."""
        return self._selector.log_probs(drafted.hidden_SE, drafted.best, parents_SP)

    def _forward(
        self,
        hidden_SE: Tensor,
        positions_S: Tensor,
        max_position: int,
        plan: Attends,
        wanted_N: Tensor | None,
    ) -> Tensor:
        stack, width, x = self._stack, self._width, hidden_SE
        cos, sin = stack.rotary.at(positions_S, max_position)
        for number, (layer, around) in enumerate(
            zip(stack.layers, self._convolutions, strict=True)
        ):
            convolved = around.attention.before(stack.norm(x, layer.input_norm), width)
            heads = stack.project(layer, convolved.input_SE, cos, sin)
            output = layer.output(plan.attend(number, heads))
            x = x + around.attention.after(output, convolved, width)
            convolved = around.mlp.before(stack.norm(x, layer.post_norm), width)
            output = layer.down(layer.gate_up(convolved.input_SE))
            x = x + around.mlp.after(output, convolved, width)
        return stack.norm(x if wanted_N is None else x[wanted_N], stack.final_norm)
