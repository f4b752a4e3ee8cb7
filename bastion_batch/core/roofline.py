"""The roofline: what a pass should take, from the model's sizes and the device's speeds.

`T = max(alpha_c * C + beta_c, alpha_m * M + beta_m) + gamma_c * A_c + gamma_m * A_m`, where C and M
are the matrix products at the device's peak and the weights at its bandwidth, and A_c and A_m are
attention's arithmetic and its reading of the cache likewise. Matrix products and attention run one
after the other, each at its own efficiency, so their times add. With attention inside the branches
(as in BASTION, arXiv 2605.29727) no fit follows both short and long contexts on a CPU, where
attention reaches a far smaller share of the peak than matrix products do.

The coefficients are fitted to timings of the very pass that verifies, by `core.fitting`. Passes
are counted in stairs (`core.stairs`) before they come here; what no roofline has, such as costs per
row, is `core.correction`'s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.devices import DeviceSpeed

MIN_SECONDS = 1e-7
"""No pass is predicted to take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide what a pass costs."""

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    bytes_per_value: int

    @property
    def weights_per_layer(self) -> int:
        """Values of one layer's matrices."""
        attention = 2 * self.hidden_size * (self.num_q_heads + self.num_kv_heads) * self.head_dim
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the layers' matrix products."""
        return 2 * self.num_layers * self.weights_per_layer

    @property
    def flops_per_logit(self) -> int:
        """Floating-point operations of the head, for one token."""
        return 2 * self.hidden_size * self.vocab_size

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations of attention for one (query, key) pair, in all layers."""
        return 4 * self.num_layers * self.num_q_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and head, each read once by a pass."""
        weights = self.num_layers * self.weights_per_layer + self.hidden_size * self.vocab_size
        return self.bytes_per_value * weights

    @property
    def bytes_per_logit(self) -> int:
        """Bytes of one token's logits."""
        return self.bytes_per_value * self.vocab_size

    @property
    def bytes_per_cached_token(self) -> int:
        """Bytes of one token's keys and values, in all layers."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_layers * self.bytes_per_value

    def flops(self, load: "PassLoad") -> NDArray[np.float64]:
        """Floating-point operations of a pass, head included."""
        linear = self.flops_per_token * load.num_tokens + self.flops_per_logit * load.num_logits
        return linear + self.flops_per_pair * load.attended_pairs

    def moved_bytes(self, load: "PassLoad") -> NDArray[np.float64]:
        """Bytes moved by a pass: weights and head once, the rows' KV read, KV written, logits."""
        cache = self.bytes_per_cached_token * (load.context_tokens + load.num_tokens)
        return self.weight_bytes + cache + self.bytes_per_logit * load.num_logits


class PassLoad(NamedTuple):
    """What a pass has to do. Fields broadcast, so that many passes are priced at once."""

    num_tokens: NDArray[np.float64]
    """Tokens through the linear layers."""
    num_rows: int
    context_tokens: float
    """Cached tokens read by attention, summed over rows."""
    attended_pairs: NDArray[np.float64]
    """(query, key) pairs, summed over rows."""
    num_logits: NDArray[np.float64]
    """Tokens through the head: fewer than all where prompts are in the pass."""

    @classmethod
    def of(
        cls, num_tokens: float | NDArray[np.floating], num_rows: int, context_tokens: float
    ) -> Self:
        """A pass of `num_tokens` spread evenly over `num_rows` rows, the head on all of them."""
        tokens = np.asarray(num_tokens, np.float64)
        pairs = tokens * ((context_tokens + tokens) / max(num_rows, 1))
        return cls(tokens, num_rows, context_tokens, pairs, tokens)

    @classmethod
    def packed(cls, sizes: Sequence[int], contexts: Sequence[int], num_logits: int) -> Self:
        """A pass over rows of unequal size.

        Args:
            sizes: tokens of each row in the pass.
            contexts: tokens of each row in the cache.
            num_logits: tokens that go through the head.
        """
        pairs = sum(size * (context + size) for size, context in zip(sizes, contexts, strict=True))
        tokens, pairs_sum, logits = np.asarray([sum(sizes), pairs, num_logits], np.float64)
        return cls(tokens, len(sizes), sum(contexts), pairs_sum, logits)

    @classmethod
    def padded(
        cls,
        num_tokens: NDArray[np.float64],
        longest: NDArray[np.float64],
        contexts: Sequence[int],
        call_pairs: int,
    ) -> Self:
        """Passes over trees of unequal size, the head on all their tokens.

        Attention computes rows together, each padded to the longest tree and context among them,
        unless that costs more than computing a row by itself.

        Args:
            num_tokens: roots and nodes of each pass.
            longest: tokens of each pass's largest tree.
            contexts: cached tokens of each row, the same in all passes.
            call_pairs: pairs that take as long as computing one more batch of rows.
        """
        num_rows, context_tokens = len(contexts), sum(contexts)
        together = num_rows * longest * (max(contexts) + longest)
        apart = num_tokens * (context_tokens + num_tokens) / num_rows + num_rows * call_pairs
        pairs = np.minimum(together, apart)
        return cls(num_tokens, num_rows, context_tokens, pairs, num_tokens)

    def plus(self, other: Self) -> Self:
        """One pass with all of both."""
        return self._make(a + b for a, b in zip(self, other, strict=True))


class Timing(NamedTuple):
    """One measured pass."""

    num_tokens: int
    num_rows: int
    context_tokens: int
    """Summed over rows."""
    seconds: float

    @property
    def load(self) -> PassLoad:
        """What the pass had to do."""
        return PassLoad.of(self.num_tokens, self.num_rows, self.context_tokens)


class Branch(NamedTuple):
    """A line: `alpha` times what the data sheet promises, plus `beta` seconds."""

    alpha: float = 1.0
    beta: float = 0.0

    def at(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """The line's value."""
        return self.alpha * seconds + self.beta


class Prices(NamedTuple):
    """A roofline applied to one model on one device: what each thing a pass does takes.

    All in seconds.
    """

    per_token: float
    per_logit: float
    compute_floor: float
    weights: float
    per_logit_written: float
    per_pair: float
    per_cached_token: float

    def of(self, load: PassLoad) -> NDArray[np.float64]:
        """Seconds of passes."""
        tokens, logits = load.num_tokens, load.num_logits
        computing = self.per_token * tokens + (self.per_logit * logits + self.compute_floor)
        linear = np.maximum(computing, self.per_logit_written * logits + self.weights)
        cached = self.per_cached_token * (load.context_tokens + tokens)
        return np.maximum(linear + cached + self.per_pair * load.attended_pairs, MIN_SECONDS)


class Roofline(NamedTuple):
    """A fitted roofline of one model on one device."""

    compute: Branch = Branch()
    memory: Branch = Branch()
    attention_compute: float = 1.0
    attention_memory: float = 1.0
    unidentified: tuple[str, ...] = ("compute", "memory", "attention")
    """Parts that never bound in the timings: their coefficients are the prior's."""

    def prices(self, shape: ModelShape, speed: DeviceSpeed) -> Prices:
        """What each thing a pass of this model does takes on this device."""
        per_flop = self.compute.alpha / speed.flops
        per_byte = self.memory.alpha / speed.bandwidth
        attention_flop = self.attention_compute / speed.flops
        attention_byte = self.attention_memory / speed.bandwidth
        return Prices(
            per_token=per_flop * shape.flops_per_token,
            per_logit=per_flop * shape.flops_per_logit,
            compute_floor=self.compute.beta,
            weights=per_byte * shape.weight_bytes + self.memory.beta,
            per_logit_written=per_byte * shape.bytes_per_logit,
            per_pair=attention_flop * shape.flops_per_pair,
            per_cached_token=attention_byte * shape.bytes_per_cached_token,
        )

    def to_dict(self) -> dict[str, Any]:
        """The coefficients by name, JSON-able; `from_dict` reads them back."""
        return self._asdict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Raises:
            KeyError, TypeError or ValueError: it is something else.
        """
        found = cls(
            compute=Branch(*map(float, data["compute"])),
            memory=Branch(*map(float, data["memory"])),
            attention_compute=float(data["attention_compute"]),
            attention_memory=float(data["attention_memory"]),
            unidentified=tuple(map(str, data["unidentified"])),
        )
        values = (*found.compute, *found.memory, found.attention_compute, found.attention_memory)
        if not all(0 <= value < math.inf for value in values):
            raise ValueError(f"coefficients {values} of a roofline: one is negative or not finite")
        return found
