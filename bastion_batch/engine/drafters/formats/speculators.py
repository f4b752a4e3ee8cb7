"""The `speculators` format: dflash, dflash2 and dspark.

The layers' configuration is nested in `transformer_layer_config`, written as its difference from
the defaults of its `model_type`. Tap numbers index transformers' hidden states, so they are one
higher than the layer whose output they mean. A head over a reduced vocabulary comes with `d2t`,
the offset from a draft id to the target's id, and `t2d`, which target ids have a draft id.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.drafters.formats.backbone import (
    claim_tensors,
    refuse_partial_rotation,
    sizes,
)
from bastion_batch.engine.drafters.formats.dspark import confidence_of, markov_of
from bastion_batch.engine.drafters.formats.fields import Fields, nested_options
from bastion_batch.engine.drafters.formats.layers import speculators_layers
from bastion_batch.engine.drafters.formats.source import DrafterSource
from bastion_batch.engine.drafters.formats.zlab import SUFFIXED, convolutions_of, selector_of
from bastion_batch.errors import ModelError

DEFAULT_BLOCK_SIZE = 8
DEFAULT_DRAFT_VOCAB_SIZE = 32_000
DEFAULT_MARKOV_RANK = 256
"""Of `speculators`' own classes; files hold differences from them."""

_SELECTOR_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "rope_theta": 10000.0, "attention_bias": False, "use_sliding_window": False,
    },
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0,
        "attention_bias": False,
    },
}  # fmt: skip
"""Of transformers' configurations, by `model_type`: what a difference from them leaves out."""

_MAP_TENSORS = frozenset({"d2t", "t2d"})


class _Block(NamedTuple):
    width: int
    first_slot: int
    num_predictions: int


def read_speculators(source: DrafterSource) -> DrafterDescription:
    """A file of one of the three algorithms.

    Raises:
        ModelError: naming the key or tensor at fault.
    """
    own = Fields(source.name, ("", source.config))
    algorithm = own.choice("speculators_model_type", ("dflash", "dflash2", "dspark"))
    layer_config = _layer_config(source)
    backbone = Fields(source.name, ("transformer_layer_config.", layer_config))
    both = Fields(
        source.name,
        ("", source.config),
        ("transformer_layer_config.", layer_config),
        ("", _SELECTOR_DEFAULTS if algorithm == "dflash2" else {}),
    )
    refuse_partial_rotation(backbone)
    block = _block(own)
    target_ids = _target_ids(source, own, backbone.integer("vocab_size"))
    description = DrafterDescription(
        **sizes(both),
        family="dflash",
        packaging="speculators",
        taps=own.taps("aux_hidden_state_layer_ids", lowest=0, shift=1),
        block_width=block.width,
        first_prediction_slot=block.first_slot,
        num_predictions=block.num_predictions,
        mask_token_id=own.integer("mask_token_id", at_least=0),
        layers=speculators_layers(own, backbone, non_causal=algorithm == "dflash2"),
        own_embedding="embed_tokens.weight" in source.tensors,
        own_head=target_ids is not None or "lm_head.weight" in source.tensors,
        target_ids_U=target_ids,
    )
    description = _with_heads(description, both, algorithm)
    carried = _MAP_TENSORS if target_ids is not None else frozenset()
    return claim_tensors(source, description, SUFFIXED, carried)


def _with_heads(
    description: DrafterDescription, fields: Fields, algorithm: str
) -> DrafterDescription:
    if algorithm == "dflash2":
        if description.target_ids_U is not None:
            fields.refuse("draft_vocab_size", "is smaller than vocab_size, which dflash2 forbids")
        convolutions, selector = convolutions_of(fields), selector_of(fields)
        return replace(description, family="dflash2", convolutions=convolutions, selector=selector)
    if algorithm == "dspark":
        markov = markov_of(fields, DEFAULT_MARKOV_RANK)
        confidence = confidence_of(fields, markov, enabled=True, with_markov=True)
        family: Literal["dspark", "dflash"] = "dspark" if markov or confidence else "dflash"
        return replace(description, family=family, markov=markov, confidence=confidence)
    return description


def _layer_config(source: DrafterSource) -> Mapping[str, Any]:
    """The nested configuration with the defaults it was written against."""
    given = nested_options(source.name, source.config, "transformer_layer_config")
    if not given:
        raise ModelError(f"{source.name}: transformer_layer_config is missing")
    kind = given.get("model_type", "qwen3")
    if kind not in LAYER_DEFAULTS:
        raise ModelError(
            f"{source.name}: transformer_layer_config.model_type is {kind!r}: "
            f"{', '.join(LAYER_DEFAULTS)} can be computed"
        )
    return {**LAYER_DEFAULTS[kind], **given}


def _block(fields: Fields) -> _Block:
    """Width and slots, from what is said of both; heads older than the keys predict from slot 1."""
    width = fields.integer("block_size", DEFAULT_BLOCK_SIZE, at_least=2)
    sampled = fields.get("sample_from_anchor")
    said = None if sampled is None else 1 - fields.flag("sample_from_anchor")
    count = _speculative_tokens(fields)
    if count is None:
        first = 1 if said is None else said
        return _Block(width, first, width - first)
    implied = width - count
    first = said if said is not None else min(max(implied, 0), 1)
    if implied < first or (implied < 2 and implied != first):
        fields.refuse(
            "speculators_config",
            f"has speculative_tokens {count} of a block of {width}, which contradicts "
            f"sample_from_anchor {sampled}",
        )
    return _Block(width, first, count)


def _speculative_tokens(fields: Fields) -> int | None:
    config = fields.get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, dict) else None
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    return (
        Fields(fields.name, ("speculators_config.proposal_methods[0].", methods[0])).integer(
            "speculative_tokens", 0, at_least=1
        )
        or None
    )


def _target_ids(source: DrafterSource, fields: Fields, vocab_size: int) -> NDArray[np.int64] | None:
    """The map of a reduced vocabulary, checked; None for a full one."""
    size = fields.integer("draft_vocab_size", DEFAULT_DRAFT_VOCAB_SIZE)
    if size == vocab_size:
        return None
    if "d2t" not in source.integers:
        fields.refuse("draft_vocab_size", f"is {size} of {vocab_size} ids, but d2t is missing")
    offsets_U = source.integers["d2t"]
    if offsets_U.shape != (size,):
        fields.refuse("draft_vocab_size", f"is {size}, but d2t is {offsets_U.shape}")
    ids_U = np.arange(size) + offsets_U
    if ids_U.min() < 0 or ids_U.max() >= vocab_size or len(np.unique(ids_U)) < size:
        raise ModelError(f"{source.name}: d2t does not give {size} different ids of {vocab_size}")
    marks_V = source.integers.get("t2d")
    if marks_V is not None and not np.array_equal(np.flatnonzero(marks_V), np.sort(ids_U)):
        raise ModelError(f"{source.name}: t2d and d2t name different ids")
    return ids_U
