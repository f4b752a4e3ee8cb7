"""DSpark without `speculators`: DeepSpec, its `dflash_*_block7`, Nemotron, SpecForge and LFM2.

    packaging   told by                                           options    predicts  embed, head
    DeepSpec    architectures has DSpark, taps at the top         top        slot 0    own
    block7      a DFlash architecture with DeepSpec's contents    top        slot 0    own
    Nemotron    DeepSpec's, and a `dflash_config`                 both       as said   as said
    SpecForge   `dflash_config.projector_type` "dspark"           nested     slot 0    target's
    LFM2        architectures has Lfm2DSpark, taps nested         both       slot 0    if there

DeepSpec's files are copies of the target's configuration, so that keys about its layers may be
noise: rope is over the whole head whatever `partial_rotary_factor` says. A Markov rank of 0 makes
plain DFlash of it, in DSpark's slots. Where a file says `sample_from_anchor`, it decides the slot.
"""

from collections.abc import Mapping
from typing import NamedTuple, cast, get_args

from bastion_batch.engine.drafters.description import (
    ConfidenceHead,
    DrafterDescription,
    LayerAttention,
    MarkovHead,
    MarkovKind,
)
from bastion_batch.engine.drafters.formats.backbone import (
    claim_tensors,
    refuse_partial_rotation,
    sizes,
)
from bastion_batch.engine.drafters.formats.fields import Fields
from bastion_batch.engine.drafters.formats.layers import full_layers, nemotron_layers, zlab_layers
from bastion_batch.engine.drafters.formats.source import DrafterSource
from bastion_batch.engine.drafters.formats.zlab import (
    KNOWN_OPTIONS,
    refuse_unknown_options,
    zlab_fields,
)

_HEAD_OPTIONS = frozenset(
    {
        "attention_mode", "confidence_head_alpha", "confidence_head_with_markov",
        "enable_confidence_head", "markov_head_type", "markov_rank", "num_anchors",
        "projector_type", "sample_from_anchor",
    }
)  # fmt: skip
_NEMOTRON_OPTIONS = frozenset({"dflash_query_causal", "has_embed_tokens", "has_lm_head"})


class _Own(NamedTuple):
    """What a file has beside the target's."""

    embedding: bool
    head: bool


def read_deepspec(source: DrafterSource) -> DrafterDescription:
    """A DeepSpec file, a `dflash_*_block7` among them."""
    fields = Fields(source.name, ("", source.config))
    return _read(
        source,
        fields,
        "DeepSpec",
        first_slot=0,
        layers=full_layers(fields),
        own=_Own(True, True),
        lowest_tap=-1,
    )


def read_nemotron(source: DrafterSource) -> DrafterDescription:
    """A Nemotron file."""
    refuse_unknown_options(source, KNOWN_OPTIONS | _HEAD_OPTIONS | _NEMOTRON_OPTIONS)
    fields = zlab_fields(source)
    return _read(
        source,
        fields,
        "Nemotron",
        first_slot=1 - fields.flag("sample_from_anchor"),
        layers=nemotron_layers(fields),
        own=_Own(fields.flag("has_embed_tokens"), fields.flag("has_lm_head")),
        lowest_tap=-1,
    )


def read_specforge(source: DrafterSource) -> DrafterDescription:
    """A SpecForge file; early ones keep the heads under `logit_head.`."""
    refuse_unknown_options(source, KNOWN_OPTIONS | _HEAD_OPTIONS)
    fields = zlab_fields(source)
    refuse_partial_rotation(fields)
    return _read(
        source,
        fields,
        "SpecForge",
        first_slot=0,
        layers=zlab_layers(fields),
        own=_Own(False, False),
        names={key: key.removeprefix("logit_head.") for key in source.tensors},
    )


def read_lfm2(source: DrafterSource) -> DrafterDescription:
    """An LFM2 file."""
    refuse_unknown_options(source, KNOWN_OPTIONS | _HEAD_OPTIONS | _NEMOTRON_OPTIONS)
    fields = zlab_fields(source)
    return _read(
        source,
        fields,
        "LFM2",
        first_slot=0,
        layers=zlab_layers(fields),
        own=_Own("embed_tokens.weight" in source.tensors, "lm_head.weight" in source.tensors),
    )


def markov_of(fields: Fields, default_rank: int | None = None) -> MarkovHead | None:
    """The Markov head; None for rank 0."""
    rank = fields.integer("markov_rank", default_rank, at_least=0)
    if rank == 0:
        return None
    kind = fields.choice("markov_head_type", get_args(MarkovKind), "vanilla")
    return MarkovHead(kind=cast("MarkovKind", kind), rank=rank)


def confidence_of(
    fields: Fields, markov: MarkovHead | None, *, enabled: bool, with_markov: bool
) -> ConfidenceHead | None:
    """The confidence head, with the defaults of the code that wrote the file."""
    if not fields.flag("enable_confidence_head", enabled):
        return None
    reads_markov = fields.flag("confidence_head_with_markov", with_markov)
    if reads_markov and markov is None:
        fields.refuse("confidence_head_with_markov", "is true, but markov_rank is 0")
    return ConfidenceHead(with_markov=reads_markov)


def _read(
    source: DrafterSource,
    fields: Fields,
    packaging: str,
    *,
    first_slot: int,
    layers: tuple[LayerAttention, ...],
    own: _Own,
    lowest_tap: int = 0,
    names: Mapping[str, str] | None = None,
) -> DrafterDescription:
    fields.choice("attention_mode", ("gqa",), "gqa")
    vocab_size = fields.integer("vocab_size")
    if fields.integer("draft_vocab_size", vocab_size) != vocab_size:
        fields.refuse("draft_vocab_size", "is smaller than vocab_size, but there is no map (d2t)")
    markov = markov_of(fields, None if source.has_any("markov_head.") else 0)
    confidence = _confidence(source, fields, markov)
    if fields.get("sample_from_anchor") is not None:
        first_slot = 1 - fields.flag("sample_from_anchor")
    width = fields.integer("block_size", at_least=1 + first_slot)
    description = DrafterDescription(
        **sizes(fields),
        family="dspark" if markov or confidence else "dflash",
        packaging=packaging,
        taps=fields.taps("target_layer_ids", lowest=lowest_tap),
        block_width=width,
        first_prediction_slot=first_slot,
        num_predictions=width - first_slot,
        mask_token_id=fields.integer("mask_token_id", at_least=0),
        layers=layers,
        markov=markov,
        confidence=confidence,
        own_embedding=own.embedding,
        own_head=own.head,
    )
    return claim_tensors(source, description, names)


def _confidence(
    source: DrafterSource, fields: Fields, markov: MarkovHead | None
) -> ConfidenceHead | None:
    """Where no key says whether there is one, the file's tensors do."""
    key = "confidence_head.proj.weight"
    header = source.tensors.get(key) or source.tensors.get(f"logit_head.{key}")
    wide = header is not None and header.shape[-1] > fields.integer("hidden_size")
    return confidence_of(fields, markov, enabled=header is not None, with_markov=wide)
