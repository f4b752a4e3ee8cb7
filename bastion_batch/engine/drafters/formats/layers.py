"""What the slots of a block see in every layer: the rules of each implementation.

They disagree, and the wrong one loads, runs and is only slower, so that each is written out:

    z-lab        full: whole block; sliding: causal block, windows from the query. `is_causal` or
                 `causal_head` decides for all layers, `causal` (as vLLM reads it) for sliding ones.
                 With `use_swa` all layers slide, and are causal only if one of the three says so.
    speculators  full: whole block; sliding: causal unless `sliding_window_non_causal`, windows from
                 the anchor.
    Nemotron     all layers alike: causal if it says so, one window for all, from the query.
"""

from bastion_batch.engine.drafters.description import LayerAttention
from bastion_batch.engine.drafters.formats.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
_DEFAULT_MAX_WINDOW_LAYERS = 28  # of Qwen3's configuration


def zlab_layers(fields: Fields) -> tuple[LayerAttention, ...]:
    """By z-lab's rule, which SpecForge shares."""
    kinds = layer_kinds(fields)
    for_all = _causal_everywhere(fields)
    if fields.get("use_swa"):
        is_causal = fields.flag("causal", False) if for_all is None else for_all
        return (LayerAttention(is_causal, _first_window(fields)),) * len(kinds)
    sliding_is_causal = fields.flag("causal", True) if for_all is None else for_all
    full = LayerAttention(bool(for_all), None)
    if SLIDING not in kinds:
        return (full,) * len(kinds)
    sliding = LayerAttention(sliding_is_causal, sliding_window(fields))
    return tuple(sliding if kind == SLIDING else full for kind in kinds)


def speculators_layers(
    fields: Fields, backbone: Fields, *, non_causal: bool
) -> tuple[LayerAttention, ...]:
    """By the rule of `speculators`.

    Args:
        fields: the outer configuration.
        backbone: that of the layers.
        non_causal: its default for `sliding_window_non_causal`.
    """
    kinds = layer_kinds(backbone)
    is_causal = not fields.flag("sliding_window_non_causal", non_causal)
    full = LayerAttention(False, None)
    if SLIDING not in kinds:
        return (full,) * len(kinds)
    sliding = LayerAttention(is_causal, sliding_window(backbone), "anchor")
    return tuple(sliding if kind == SLIDING else full for kind in kinds)


def nemotron_layers(fields: Fields) -> tuple[LayerAttention, ...]:
    """By the rule of Nemotron's DSpark files."""
    count = fields.integer("num_hidden_layers")
    is_causal = fields.flag("dflash_query_causal", False) or fields.flag("causal", False)
    window = fields.get("sliding_window")
    if window is not None or fields.get("use_swa"):
        window = _first_window(fields)
    return (LayerAttention(is_causal, window),) * count


def full_layers(fields: Fields) -> tuple[LayerAttention, ...]:
    """Whole blocks in all layers; anything else is refused."""
    kinds = layer_kinds(fields)
    if SLIDING in kinds:
        fields.refuse("layer_types", f"holds {SLIDING}, which this packaging does not have")
    return (LayerAttention(False, None),) * len(kinds)


def layer_kinds(fields: Fields) -> list[str]:
    """The kind of every layer; Qwen3's rule where they are not listed."""
    count = fields.integer("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is None:
        slides = fields.flag("use_sliding_window", False) and fields.get("sliding_window")
        first = fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, at_least=0)
        return [SLIDING if slides and layer >= first else FULL for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        fields.refuse("layer_types", f"is {kinds!r}: one for each of {count} layers is needed")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            fields.refuse("layer_types", f"holds {kind!r}: {FULL} and {SLIDING} can be computed")
    return kinds


def sliding_window(fields: Fields) -> int:
    """The window of sliding layers, which must be switched on."""
    if not fields.flag("use_sliding_window", True):
        fields.refuse("use_sliding_window", f"is false, but layer_types holds {SLIDING}")
    return fields.integer("sliding_window")


def _causal_everywhere(fields: Fields) -> bool | None:
    """What is said about all layers at once; None where nothing is."""
    said = {key: fields.flag(key) for key in ("is_causal", "causal_head") if fields.get(key)}
    if fields.get("is_causal") is False:
        if said.get("causal_head"):
            fields.refuse("causal_head", "is true, but is_causal is false")
        return False
    return True if said else None


def _first_window(fields: Fields) -> int:
    key = "swa_window_size" if fields.get("swa_window_size") is not None else "sliding_window"
    return fields.integer(key)
