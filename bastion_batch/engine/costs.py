"""What the parts of a step cost on this device: predicted, and learnt from every step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.latency import LatencyModel
from bastion_batch.core.roofline import ModelShape, PassLoad


class DraftLoad(NamedTuple):
    """What a draft pass has to do."""

    num_positions: int
    """Positions that are scored, over all rows."""
    num_rows: int
    context_tokens: int
    """Cached tokens, summed over the rows."""

    @property
    def place(self) -> tuple[int, int, int]:
        """As a latency model counts: tokens, rows, context.

        Every row has its root and the positions that are scored. Those that are not go through the
        layers all the same, which is little beside the head, and proportional to the rows.
        """
        return self.num_positions + self.num_rows, self.num_rows, self.context_tokens


class _PlainSteps:
    """How long steps without drafting take: factors of the roofline by power of two of the rows."""

    RATE = 0.25

    def __init__(self, model: LatencyModel) -> None:
        self._model = model
        self._log_factors: dict[int, float] = {}

    def seconds(self, num_rows: int, context_tokens: int) -> float | None:
        known = self._log_factors.get(num_rows.bit_length())
        return None if known is None else self._base(num_rows, context_tokens) * math.exp(known)

    def observe(self, num_rows: int, context_tokens: float, seconds: float) -> None:
        factor = math.log(seconds / self._base(num_rows, context_tokens))
        known = self._log_factors.setdefault(num_rows.bit_length(), factor)
        self._log_factors[num_rows.bit_length()] += self.RATE * (factor - known)

    def _base(self, num_rows: int, context_tokens: float) -> float:
        return self._model.base_seconds(PassLoad.of(num_rows, num_rows, context_tokens))


class StepCosts:
    """Predicted seconds of the parts of a step, each corrected by what is observed.

    `verify` and `draft` are rooflines with corrections. What a step takes beside its verification
    pass and its drafting is a running mean over decode steps. Passes that carry prompts are priced,
    but teach nothing.

    Args:
        verify_model: of the target's pass.
        draft_model: of the drafter's pass; None if there is none worth pricing.
        call_pairs: (query, key) pairs that take as long as calling attention once more.
    """

    def __init__(
        self,
        verify_model: LatencyModel,
        draft_model: LatencyModel | None,
        call_pairs: int = 4096,
    ) -> None:
        self.verify = verify_model
        self.draft = draft_model
        self.call_pairs = call_pairs
        self.other_seconds = 1e-3
        self._plain = _PlainSteps(verify_model)

    def plain_step_seconds(self, num_rows: int, context_tokens: int) -> float:
        """Predicted seconds of a step without drafting: what drafting is held against.

        From plain steps of about as many rows, if there were any. The models are also moved by
        drafted steps, which do more beside their passes, and those may become all that they see.
        """
        known = self._plain.seconds(num_rows, context_tokens)
        if known is not None:
            return known
        return self.verify.seconds(num_rows, num_rows, context_tokens) + self.other_seconds

    def observe_plain_step(self, num_rows: int, context_tokens: float, seconds: float) -> None:
        """Learn from a step in which nothing was drafted."""
        self._plain.observe(num_rows, context_tokens, seconds)

    def load_of_trees(
        self,
        num_tokens: NDArray[np.float64],
        longest: NDArray[np.float64],
        contexts: Sequence[int],
    ) -> PassLoad:
        """What passes over trees have to do.

        Args:
            num_tokens: roots and nodes of each pass.
            longest: tokens of each pass's largest tree.
            contexts: cached tokens of each row.
        """
        return PassLoad.padded(num_tokens, longest, contexts, self.call_pairs)

    def observe_verify(self, load: PassLoad, seconds: float) -> None:
        """Learn from a verification pass without prompts."""
        self.verify.observe(load, seconds)

    def draft_seconds(self, load: DraftLoad) -> float:
        """Predicted seconds of a draft pass."""
        return 0.0 if self.draft is None else self.draft.seconds(*load.place)

    def observe_draft(self, load: DraftLoad, seconds: float) -> None:
        """Learn from a draft pass."""
        if self.draft is not None:
            self.draft.observe(PassLoad.of(*load.place), seconds)

    def observe_other(self, seconds: float) -> None:
        """Learn from the time of a step outside its passes."""
        self.other_seconds += 0.05 * (seconds - self.other_seconds)

    def scale(self, factor: float) -> None:
        """Take the device to be slower by a factor in all passes."""
        self.verify.scale(factor)
        if self.draft is not None:
            self.draft.scale(factor)

    def summary(self) -> dict[str, Any]:
        """The fitted models and how well they predict, JSON-able."""
        return {
            "verify": self.verify.summary(),
            "draft": self.draft.summary() if self.draft else None,
            "other_seconds": self.other_seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything fitted and learnt, JSON-able; `from_dict` reads it back."""
        return {
            "verify": self.verify.to_dict(),
            "draft": self.draft.to_dict() if self.draft else None,
            "other_seconds": self.other_seconds,
            "call_pairs": self.call_pairs,
        }

    @classmethod
    def from_dict(
        cls, target: ModelShape, drafter: ModelShape | None, data: Mapping[str, Any]
    ) -> Self:
        """Read what `to_dict` wrote for models of the same shapes.

        Raises:
            KeyError, TypeError or ValueError: it is something else.
        """
        if (data["draft"] is None) != (drafter is None):
            raise ValueError("the costs are of an engine with another drafter")
        draft = LatencyModel.from_dict(drafter, data["draft"]) if drafter else None
        costs = cls(LatencyModel.from_dict(target, data["verify"]), draft, int(data["call_pairs"]))
        costs.other_seconds = float(data["other_seconds"])
        if not 0 < costs.other_seconds < math.inf:
            raise ValueError(f"other_seconds is {costs.other_seconds}")
        return costs
