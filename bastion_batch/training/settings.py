"""What a training run is: the drafter's shape, the recipe, and where they come from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.errors import InputError, ModelError

OptimizerName = Literal["muon", "adamw"]
NUM_TAPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A DFlash drafter in z-lab's format: what its `config.json` says."""

    num_layers: int
    block_size: int
    """W: the anchor and the positions that are predicted."""
    taps: tuple[int, ...]
    """0-based target layers."""
    mask_token_id: int
    hidden_size: int
    ffn_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    vocab_size: int
    """Rows of the target's embedding."""
    num_target_layers: int
    attention_bias: bool = False
    """Whether the projections of attention have biases."""

    def require_usable(self) -> None:
        """Check that such a drafter can be trained.

        Raises:
            InputError: naming the option, its value and the limit.
        """
        if self.num_layers < 1:
            raise InputError(f"layers is {self.num_layers}; at least 1 is needed")
        if self.block_size < 2:
            raise InputError(f"block size is {self.block_size}; at least 2 is needed")
        outside = [tap for tap in self.taps if not 0 <= tap < self.num_target_layers]
        if outside or not self.taps or len(set(self.taps)) < len(self.taps):
            raise InputError(
                f"taps are {list(self.taps)}; they are distinct layers of the target, "
                f"0 to {self.num_target_layers - 1}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask token id is {self.mask_token_id}; the target's embedding has "
                f"{self.vocab_size} rows"
            )

    def changed(self, **values: object) -> "Shape":
        """The same shape with those of the values that are not None."""
        given = {name: value for name, value in values.items() if value is not None}
        return replace(self, **given)  # type: ignore[arg-type]

    def to_config(self) -> dict[str, Any]:
        """`config.json` as PyPI `dflash` and this package read it."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.num_layers,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "dtype": "bfloat16",
            "dflash_config": {
                "target_layer_ids": list(self.taps),
                "mask_token_id": self.mask_token_id,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a drafter is trained. All of it decides what comes out, except where it says so."""

    steps: int = 5000
    """Of the optimiser. May change when a run goes on; the learning rate follows it."""
    sequences: int = 16
    """Texts of a step."""
    anchors: int = 12
    """Blocks of a text in a step."""
    landing_share: float = 0.5
    """Of the anchors: drawn where steps of the drafter have begun, the others uniformly."""
    optimizer: OptimizerName = "muon"
    """What moves matrices; AdamW moves the rest."""
    learning_rate: float = 1e-3
    warmup_share: float = 0.04
    """Of the steps, in which the learning rate rises."""
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    decay: float = 4.0
    """Position j of a block weighs exp(-(j - 1) / decay)."""
    teacher_share: float = 0.7
    """Of what a position should predict: the target's own distribution there, over its likeliest
    tokens; the rest is the text's token."""
    loss_tokens: int | None = None
    """Cross-entropy over so many of the target's commonest tokens, those of the step, and as many
    others drawn at random, instead of the whole vocabulary."""
    max_text_tokens: int = 1024
    """Longer texts are cut."""
    seed: int = 0

    def require_usable(self) -> None:
        """Check the ranges.

        Raises:
            InputError: naming the option, its value and the limit.
        """
        for name in ("steps", "sequences", "anchors"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("learning_rate", "decay", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("landing_share", "warmup_share", "teacher_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it is from 0 to 1")
        if self.loss_tokens is not None and self.loss_tokens < 1:
            raise InputError(f"loss_tokens is {self.loss_tokens}; at least 1 is needed")

    @property
    def identity(self) -> dict[str, Any]:
        """What a run keeps when it goes on."""
        return {name: value for name, value in asdict(self).items() if name != "steps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What happens beside the training.

    It may change whenever a run goes on, except for what its measurements are compared by:
    `check_tokens` and `tree_nodes`.
    """

    check_every: int = 500
    """Steps between two measurements on the held-out prompts."""
    save_every: int = 100
    """Steps between two saved states."""
    patience: int = 6
    """Measurements without a better one after which training ends."""
    check_tokens: int = 128
    """New tokens of each held-out prompt."""
    tree_nodes: int = 64
    """Drafted nodes per row of the tree that is measured."""
    cache_bytes: int = 8_000_000_000
    """Disk for the taps of the texts; those of further texts are computed when needed."""

    def require_usable(self) -> None:
        """Check the ranges.

        Raises:
            InputError: naming the option, its value and the limit.
        """
        for name in ("check_every", "save_every", "patience", "check_tokens", "tree_nodes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.cache_bytes < 0:
            raise InputError(f"cache_bytes is {self.cache_bytes}; at least 0 is needed")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Rising layers, spread evenly from the second to the third from the end, or over a small target.

    There are `NUM_TAPS` of them, or as many as the target has layers.
    """
    first, last, count = 1, num_layers - 3, NUM_TAPS
    if num_layers < NUM_TAPS + 3:
        first, last, count = 0, num_layers - 1, min(NUM_TAPS, num_layers)
    return tuple(int(tap) for tap in np.linspace(first, last, count).round())


def shape_for(
    config: Mapping[str, Any], *, num_layers: int, block_size: int, mask_token_id: int
) -> Shape:
    """The shape of a drafter whose layers are like those of a target with this `config.json`."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return Shape(
        num_layers=num_layers,
        block_size=block_size,
        taps=default_taps(config["num_hidden_layers"]),
        mask_token_id=mask_token_id,
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_q_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        max_positions=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        num_target_layers=config["num_hidden_layers"],
        attention_bias=config["model_type"] == "qwen2" or bool(config.get("attention_bias")),
    )


def shape_of(drafter: DrafterDescription, num_target_layers: int) -> Shape:
    """The shape of an existing drafter, if it is one that is trained here.

    Raises:
        ModelError: it is of another family, or has what plain DFlash has not.
    """
    rope = drafter.rope.parameters
    others = {
        f"family {drafter.family!r}": drafter.family != "dflash",
        "causal or windowed layers": any(a.causal or a.window for a in drafter.layers),
        "predictions from slot 0": drafter.first_prediction_slot != 1,
        "a reduced vocabulary": drafter.target_ids_U is not None,
        "an embedding or head of its own": drafter.own_embedding or drafter.own_head,
        f"rope_type {rope.get('rope_type')!r}": rope.get("rope_type", "default") != "default",
        "interleaved rotary positions": drafter.rope.interleaved,
        "scaled values, embeddings or logits": drafter.softcap is not None
        or (drafter.value_scale, drafter.embedding_scale, drafter.output_multiplier) != (1, 1, 1),
        "a tap of the embedding": min(drafter.taps) < 0,
    }
    found = [what for what, there in others.items() if there]
    if found:
        raise ModelError(
            f"drafter {drafter.name} has {', '.join(found)}; training goes on from plain DFlash "
            "drafters only"
        )
    return Shape(
        num_layers=drafter.num_layers,
        block_size=drafter.block_width,
        taps=drafter.taps,
        mask_token_id=drafter.mask_token_id,
        hidden_size=drafter.hidden_size,
        ffn_size=drafter.ffn_size,
        num_q_heads=drafter.num_q_heads,
        num_kv_heads=drafter.num_kv_heads,
        head_dim=drafter.head_dim,
        norm_eps=drafter.norm_eps,
        rope_theta=float(rope["rope_theta"]),
        max_positions=drafter.rope.max_positions,
        vocab_size=drafter.vocab_size,
        num_target_layers=num_target_layers,
        attention_bias=drafter.attention_bias,
    )


def free_token_id(tokenizer: Any, num_rows: int, config_path: Path) -> int:  # noqa: ANN401
    """A token that text cannot contain, for the mask.

    A row of the embedding beyond the tokenizer, or else the last special token that neither begins,
    ends nor structures a text.

    Raises:
        ModelError: there is none.
    """
    first_beyond = max(tokenizer.get_vocab().values()) + 1
    if first_beyond < num_rows:
        return first_beyond
    template = str(getattr(tokenizer, "chat_template", None) or "")
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    used.add(tokenizer.unk_token_id)
    special = [
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number not in used and token.content not in template
    ]
    if not special:
        raise ModelError(
            f"target {config_path}: its tokenizer has no special token to spare for the mask; "
            "give --mask-token-id, the id of a token that text does not contain"
        )
    return max(special)
