"""z-lab's own format: DFlash, JetSpec's causal heads, and DFlash 2.

A Qwen3 configuration with a nested `dflash_config`; what is nested wins. The file has no embedding
and no head. `block_size` is at the top level in old files, nested in newer ones, 16 where absent.
"""

from bastion_batch.engine.drafters.description import (
    BlockConvolutions,
    DrafterDescription,
    SelectorHead,
)
from bastion_batch.engine.drafters.formats.backbone import (
    claim_tensors,
    refuse_partial_rotation,
    sizes,
)
from bastion_batch.engine.drafters.formats.fields import Fields, nested_options
from bastion_batch.engine.drafters.formats.layers import zlab_layers
from bastion_batch.engine.drafters.formats.source import DrafterSource

DEFAULT_BLOCK_SIZE = 16

KNOWN_OPTIONS = frozenset(
    {
        "attention_value_scale", "block_size", "causal", "causal_head", "final_logit_softcapping",
        "input_embedding_scale", "is_neox_style", "mask_token", "mask_token_id",
        "num_target_layers", "output_multiplier", "rope_is_neox_style", "swa_window_size",
        "target_hidden_size", "target_layer_ids", "use_swa",
    }
)  # fmt: skip
SELECTOR_OPTIONS = frozenset(
    {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
)


def zlab_fields(source: DrafterSource) -> Fields:
    """The keys of a file with nested `dflash_config`."""
    nested = nested_options(source.name, source.config, "dflash_config")
    return Fields(source.name, ("dflash_config.", nested), ("", source.config))


def refuse_unknown_options(source: DrafterSource, known: frozenset[str]) -> None:
    """Refuse options that are set and not understood: each could change the model."""
    nested = nested_options(source.name, source.config, "dflash_config")
    for key in sorted(nested.keys() - known):
        if nested[key] not in (None, False):
            zlab_fields(source).refuse(key, f"is {nested[key]!r}, which is not understood")


def read_dflash(source: DrafterSource) -> DrafterDescription:
    """A DFlash or JetSpec file."""
    refuse_unknown_options(source, KNOWN_OPTIONS)
    return claim_tensors(source, _describe(source))


def read_dflash2(source: DrafterSource) -> DrafterDescription:
    """A DFlash 2 file."""
    refuse_unknown_options(source, KNOWN_OPTIONS | SELECTOR_OPTIONS)
    fields = zlab_fields(source)
    return claim_tensors(
        source, _describe(source, convolutions_of(fields), selector_of(fields)), SUFFIXED
    )


SUFFIXED = {
    f"candidate_selector.{name}.weight": f"candidate_selector.{name}"
    for name in ("predecessor_codebook", "successor_codebook")
}
"""What a file calls the codebooks if it was saved from modules and not from parameters."""


def convolutions_of(fields: Fields) -> BlockConvolutions:
    """The convolutions of a DFlash 2 file."""
    taps, group = fields.integer("conv_kernel_size"), fields.integer("conv_group_size")
    if fields.integer("hidden_size") % group:
        fields.refuse("conv_group_size", f"is {group}, which does not divide the hidden size")
    return BlockConvolutions(num_taps=taps, group_size=group)


def selector_of(fields: Fields) -> SelectorHead:
    """The selector of a DFlash 2 file."""
    top_k, vocab_size = fields.integer("selector_top_k"), fields.integer("vocab_size")
    if top_k > vocab_size:
        fields.refuse("selector_top_k", f"is {top_k}; the vocabulary has {vocab_size} ids")
    return SelectorHead(rank=fields.integer("selector_rank"), num_candidates=top_k)


def _describe(
    source: DrafterSource,
    convolutions: BlockConvolutions | None = None,
    selector: SelectorHead | None = None,
) -> DrafterDescription:
    fields = zlab_fields(source)
    refuse_partial_rotation(fields)
    vocab_size = fields.integer("vocab_size")
    if fields.integer("draft_vocab_size", vocab_size) != vocab_size:
        fields.refuse("draft_vocab_size", "is smaller than vocab_size, but there is no map (d2t)")
    block_size = fields.integer("block_size", DEFAULT_BLOCK_SIZE, at_least=2)
    return DrafterDescription(
        **sizes(fields),
        family="dflash2" if selector else "dflash",
        packaging="z-lab",
        taps=fields.taps("target_layer_ids", lowest=0),
        block_width=block_size,
        first_prediction_slot=1,
        num_predictions=block_size - 1,
        mask_token_id=fields.integer("mask_token_id", at_least=0),
        layers=zlab_layers(fields),
        convolutions=convolutions,
        selector=selector,
    )
