"""What a drafter checkpoint is, whatever packaging it came in.

The readers in `formats` turn a `config.json` and the names, shapes and types of its tensors into
one `DrafterDescription`; everything that computes reads only that, and tensors under their
normalised names. A description is complete: nothing about the model is decided again later, and
nothing in it depends on the target it will be bound to (`dflash_files.require_fit` compares them).

Positions: a row's *anchor* is its last committed token, which is not context yet. A block has W
slots; slot 0 holds the anchor and every other slot the mask token. A drafter predicts from slot
`first_prediction_slot` on:

    first_prediction_slot 1 (z-lab):    slot j predicts position anchor + j,     D = W - 1
    first_prediction_slot 0 (DeepSpec): slot j predicts position anchor + 1 + j, D = W

Shape letters: W block width, D depth, T taps, E hidden size, V target vocabulary, U draft
vocabulary, N low rank, C convolution taps.

Normalised tensor names (z-lab's):

    fc.weight [E, T * E_target]   hidden_norm.weight, norm.weight [E]
    layers.{i}.{input_layernorm,post_attention_layernorm}.weight [E]
    layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}, layers.{i}.self_attn.{q,k}_norm.weight
    layers.{i}.mlp.{gate,up,down}_proj.weight
    embed_tokens.weight [V, E] if `own_embedding`; lm_head.weight [U, E] if `own_head`
    DFlash 2: layers.{i}.{attention,mlp}_conv.base_kernel [2, C, E],
        layers.{i}.{attention,mlp}_conv.kernel_projection.weight [2 * C * E / group_size, E],
        candidate_selector.hidden_projection.weight [N, E],
        candidate_selector.{predecessor,successor}_codebook [V or U, N]
    DSpark: markov_head.markov_w1.weight [V, N], markov_head.markov_w2.weight [U, N],
        gated: markov_head.gate_proj.{weight [N, E + N], bias [N]},
        rnn: markov_head.joint_proj.{weight [3 * N, 2 * N + E], bias [3 * N]},
        confidence_head.proj.{weight [1, E (+ N)], bias [1]}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Family = Literal["dflash", "dflash2", "dspark"]
"""What computes: a plain block, one with convolutions and a selector, one with a Markov head."""

MarkovKind = Literal["vanilla", "gated", "rnn"]
"""How the token before a slot becomes a bias."""

WindowOrigin = Literal["query", "anchor"]
"""From where a window is measured.

query: a key at position k is seen from position q if q - k < window, and, where the block is not
    causal, k - q < window.
anchor: context at position k is seen by the whole block if k >= anchor - window; the window never
    hides anything of the block itself.
"""


class LayerAttention(NamedTuple):
    """What the slots of a block see in one layer."""

    causal: bool
    """Whether a slot sees only itself and earlier slots of its block, not the whole block."""
    window: int | None
    """Tokens; None where all context is seen."""
    window_origin: WindowOrigin = "query"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions."""

    parameters: Mapping[str, Any]
    """`rope_theta`, `rope_type` and what the type needs, as transformers spells them."""
    max_positions: int
    """`max_position_embeddings` of the checkpoint."""
    interleaved: bool = False
    """Whether channels 2i and 2i + 1 of a head are rotated together, not i and i + D / 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConvolutions:
    """DFlash 2: causal dynamic convolutions inside the block, around both sublayers."""

    num_taps: int
    """C, `conv_kernel_size`."""
    group_size: int
    """Channels that share a dynamic coefficient, `conv_group_size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorHead:
    """DFlash 2: scores of candidate transitions between neighbouring slots."""

    rank: int
    """N, `selector_rank`."""
    num_candidates: int
    """Best tokens of a slot that are scored, `selector_top_k`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovHead:
    """DSpark: a bias on a slot's logits from the token before it."""

    kind: MarkovKind
    rank: int
    """N, `markov_rank`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceHead:
    """DSpark: the chance that a slot is accepted given that those before it were."""

    with_markov: bool
    """Whether it also reads the embedding of the token before the slot."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrafterDescription:
    """A drafter's model, complete and normalised."""

    name: str
    """What messages call it: the checkpoint's path or name."""
    family: Family
    packaging: str
    """Which kind of file it came in, for messages and records."""

    taps: tuple[int, ...]
    """0-based target layers whose outputs are concatenated, in this order; -1 is the embedding
    output, before the first layer."""
    block_width: int
    """W: slots of a block, that of the anchor included."""
    first_prediction_slot: int
    """0 or 1: the first slot whose output is a prediction."""
    num_predictions: int
    """D: positions proposed; at most W - `first_prediction_slot`."""
    mask_token_id: int

    hidden_size: int
    """E, of the drafter."""
    target_hidden_size: int
    """Values of one tap."""
    num_target_layers: int | None
    """Depth of the target it was made for, if the file says so."""
    vocab_size: int
    """V as the checkpoint states it: rows of the target's embedding."""
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    attention_bias: bool = False
    """Whether q, k, v and o projections have biases."""
    layers: tuple[LayerAttention, ...]
    rope: Rope
    value_scale: float = 1.0
    """Multiplies every value vector."""

    embedding_scale: float = 1.0
    """Multiplies the rows of the embedding that enter a block."""
    output_multiplier: float = 1.0
    """Multiplies logits."""
    softcap: float | None = None
    """c, where logits x become c * tanh(x / c) after the multiplier."""
    own_embedding: bool = False
    """Whether the file has its own embedding; else the target's is used."""
    own_head: bool = False
    """Whether the file has its own head; else the target's is used."""
    target_ids_U: NDArray[np.int64] | None = None
    """The target's id of every draft id, where the head is over a reduced vocabulary."""

    convolutions: BlockConvolutions | None = None
    """Of DFlash 2, always there in it."""
    selector: SelectorHead | None = None
    """Of DFlash 2, always there in it."""
    markov: MarkovHead | None = None
    """Of DSpark; None where `markov_rank` is 0."""
    confidence: ConfidenceHead | None = None
    """Of DSpark, optional."""

    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """The normalised name of every tensor of the file that the model needs; those that only carry
    the description itself (`d2t`, `t2d`) are claimed by the reader and not listed."""

    @property
    def depth(self) -> int:
        """D, the most positions proposed."""
        return self.num_predictions

    @property
    def num_layers(self) -> int:
        """Layers of the drafter, which need not be as many as its taps."""
        return len(self.layers)

    @property
    def feature_size(self) -> int:
        """Values that the taps of one token have together, T * E_target."""
        return len(self.taps) * self.target_hidden_size

    @property
    def num_draft_ids(self) -> int:
        """U: ids the head scores."""
        return self.vocab_size if self.target_ids_U is None else len(self.target_ids_U)
