"""How weights follow gradients: Muon for matrices, AdamW for the others, or AdamW for all.

Muon's steps are of one size in every direction of a matrix: the training loss falls faster, at some
work per step. They are scaled as in "Muon is Scalable for LLM Training" (arXiv 2502.16982), so that
both take the same learning rate.
"""

import torch
from torch import Tensor, nn

from bastion_batch.training.settings import OptimizerName

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""What may be remembered of a parameter."""
_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95


class Optimizer:
    """Steps of a model's parameters.

    Args:
        model: whose.
        name: what moves its matrices; AdamW moves the rest of it.
        weight_decay: of matrices.
    """

    def __init__(self, model: nn.Module, name: OptimizerName, weight_decay: float) -> None:
        self._parameters = list(model.parameters())
        matrices = [p for p in self._parameters if p.ndim == 2]
        others = [p for p in self._parameters if p.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                weight_decay=weight_decay,
                momentum=_MOMENTUM,
                adjust_lr_fn="match_rms_adamw",
            )
            if name == "muon"
            else torch.optim.AdamW(matrices, weight_decay=weight_decay, betas=_BETAS),
            torch.optim.AdamW(others, weight_decay=0.0, betas=_BETAS),
        ]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def clip(self, max_norm: float) -> Tensor:
        """Shorten the gradient to this length; returns the one it had."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def step(self, learning_rate: float) -> None:
        """Follow the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What it remembers of a parameter; empty before its first step."""
        part = next(part for part in self._parts if _moves(part, parameter))
        return part.state[parameter]

    def restore(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Remember what another one did."""
        own = self.state_of(parameter)
        for key, value in state.items():
            own[key] = value.to("cpu" if key == "step" else parameter.device)


def _moves(part: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is own for group in part.param_groups for own in group["params"])
