"""What all packagings share: sizes, rope and scales of the layers, and which tensors they need."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bastion_batch.engine.drafters.description import DrafterDescription, Rope
from bastion_batch.engine.drafters.formats.fields import Fields
from bastion_batch.engine.drafters.formats.layers import FULL, SLIDING, layer_kinds
from bastion_batch.engine.drafters.formats.source import FLOAT_TYPES, DrafterSource
from bastion_batch.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = (
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "truncate",
)
_ARCHITECTURES = ("qwen3", "llama")
"""Values of `model_type` that stand for the layers computed here, whose tensors decide."""

REFUSED_KEYS = (
    "attention_sink_bias",
    "draft_shift",
    "log_snr_conditioning",
    "quantization_config",
)
"""Keys that, if set, make another model of the one computed here."""


def sizes(fields: Fields) -> dict[str, Any]:
    """The fields of a description that every packaging spells alike.

    Raises:
        ModelError: naming the key that is missing, out of range or not understood.
    """
    for key in REFUSED_KEYS:
        if fields.get(key):
            fields.refuse(key, "is set, which is not supported")
    fields.choice("model_type", _ARCHITECTURES, "qwen3")
    fields.choice("hidden_act", ("silu",), "silu")
    softcap = fields.number("final_logit_softcapping", 0.0)
    return {
        "name": fields.name,
        "hidden_size": fields.integer("hidden_size"),
        "target_hidden_size": fields.integer("target_hidden_size", fields.integer("hidden_size")),
        "num_target_layers": fields.get("num_target_layers"),
        "vocab_size": fields.integer("vocab_size"),
        "num_q_heads": fields.integer("num_attention_heads"),
        "num_kv_heads": _num_kv_heads(fields),
        "head_dim": _head_dim(fields),
        "ffn_size": fields.integer("intermediate_size"),
        "norm_eps": fields.number("rms_norm_eps"),
        "attention_bias": fields.flag("attention_bias", False),
        "rope": rope(fields),
        "value_scale": fields.number("attention_value_scale", 1.0),
        "embedding_scale": fields.number("input_embedding_scale", 1.0),
        "output_multiplier": fields.number("output_multiplier", 1.0),
        "softcap": softcap if softcap > 0 else None,
    }


def rope(fields: Fields) -> Rope:
    """Rotary positions, in either spelling."""
    spelled = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    given = fields.get(spelled) or {}
    if not isinstance(given, dict):
        fields.refuse(spelled, f"is {given!r}, not an object")
    given = _of_all_layers(fields, spelled, given)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        fields.refuse(spelled, f"has rope_type {kind!r}: {', '.join(ROPE_TYPES)} can be computed")
    theta = given.get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        fields.refuse("rope_theta", "is missing")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        fields.refuse("rope_theta", f"is {theta!r}: a positive number is needed")
    parameters = {key: given[key] for key in _ROPE_KEYS if given.get(key) is not None}
    neox = [fields.get(key) for key in ("is_neox_style", "rope_is_neox_style")]
    return Rope(
        parameters={"rope_type": kind, "rope_theta": float(theta), **parameters},
        max_positions=fields.integer("max_position_embeddings"),
        interleaved=False in neox,
    )


def _of_all_layers(fields: Fields, spelled: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one rotation of all layers; `speculators` takes the sliding layers' whatever there is."""
    nested = {kind: given[kind] for kind in (FULL, SLIDING) if isinstance(given.get(kind), dict)}
    if not nested:
        return given
    if SLIDING not in nested:
        fields.refuse(spelled, f"has {FULL} but no {SLIDING}: give one object for all layers")
    is_speculators = fields.get("speculators_model_type") is not None
    is_other = nested.get(FULL, nested[SLIDING]) != nested[SLIDING]
    if is_other and not is_speculators and FULL in layer_kinds(fields):
        fields.refuse(
            spelled,
            f"differs between {FULL} and {SLIDING}, and layer_types holds {FULL}: only one "
            "rotation for all layers can be computed",
        )
    return nested[SLIDING]


def refuse_partial_rotation(fields: Fields) -> None:
    """Refuse a rotation of only some channels, where the file's own code would compute one."""
    given = fields.get("rope_parameters") or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    found = [level.get("partial_rotary_factor") for level in (given, *nested)]
    for factor in (*found, fields.get("partial_rotary_factor")):
        if factor not in (None, 1, 1.0):
            fields.refuse("partial_rotary_factor", f"is {factor!r}: only 1 can be computed")


def claim_tensors(
    source: DrafterSource,
    description: DrafterDescription,
    names: Mapping[str, str] | None = None,
    carried: frozenset[str] = frozenset(),
) -> DrafterDescription:
    """The description with the names of its tensors, all of which are there in their shapes.

    Args:
        source: the checkpoint.
        description: everything but the names.
        names: normalised names of tensors that the packaging calls something else.
        carried: tensors that only carry the description itself.

    Raises:
        ModelError: naming the tensors that are missing, unclaimed, or of another shape or type.
    """
    renamed = names or {}
    found = {key: renamed.get(key, key) for key in source.tensors if key not in carried}
    expected = expected_shapes(description)
    missing = sorted(expected.keys() - found.values())
    unclaimed = sorted(key for key, name in found.items() if name not in expected)
    if missing or unclaimed:
        raise ModelError(
            f"{source.name}: as {description.packaging} {description.family}, missing tensors "
            f"{missing}, unclaimed tensors {unclaimed}"
        )
    for key, name in found.items():
        shape, dtype = source.tensors[key]
        if shape != expected[name]:
            hint = _fusion_hint(description) if name == "fc.weight" else ""
            raise ModelError(f"{source.name}: {key} is {shape}, expected {expected[name]}{hint}")
        if dtype not in FLOAT_TYPES:
            half = ": float16 overflows where the taps are fused" if dtype == "F16" else ""
            raise ModelError(
                f"{source.name}: dtype of {key} is {dtype}{half}; give a checkpoint in bfloat16 "
                "or float32"
            )
    return replace(description, tensor_names=found)


def _fusion_hint(description: DrafterDescription) -> str:
    return (
        f" from hidden_size {description.hidden_size} and {len(description.taps)} taps of "
        f"{description.target_hidden_size} values"
    )


def expected_shapes(description: DrafterDescription) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor the model needs, by its normalised name."""
    hidden = description.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, description.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(description.num_layers):
        shapes |= {f"layers.{layer}.{k}": s for k, s in _layer_shapes(description).items()}
    if description.own_embedding:
        shapes["embed_tokens.weight"] = (description.vocab_size, hidden)
    if description.own_head:
        shapes["lm_head.weight"] = (description.num_draft_ids, hidden)
    return shapes | _selector_shapes(description) | _markov_shapes(description)


def _layer_shapes(description: DrafterDescription) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head = description.hidden_size, description.ffn_size, description.head_dim
    queries, keys = description.num_q_heads * head, description.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if description.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"self_attn.{name}.bias"] = shapes[f"self_attn.{name}.weight"][:1]
    if convolutions := description.convolutions:
        taps, groups = convolutions.num_taps, hidden // convolutions.group_size
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes


def _selector_shapes(description: DrafterDescription) -> dict[str, tuple[int, ...]]:
    selector = description.selector
    if selector is None:
        return {}
    prefix = "candidate_selector."
    return {
        f"{prefix}hidden_projection.weight": (selector.rank, description.hidden_size),
        f"{prefix}predecessor_codebook": (description.vocab_size, selector.rank),
        f"{prefix}successor_codebook": (description.vocab_size, selector.rank),
    }


def _markov_shapes(description: DrafterDescription) -> dict[str, tuple[int, ...]]:
    hidden, markov = description.hidden_size, description.markov
    shapes: dict[str, tuple[int, ...]] = {}
    rank = markov.rank if markov else 0
    if markov:
        shapes["markov_head.markov_w1.weight"] = (description.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (description.num_draft_ids, rank)
        if markov.kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if markov.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if description.confidence:
        width = hidden + (rank if description.confidence.with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _num_kv_heads(fields: Fields) -> int:
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} heads")
    return kv_heads


def _head_dim(fields: Fields) -> int:
    heads = fields.integer("num_attention_heads")
    size = fields.integer("head_dim", max(1, fields.integer("hidden_size") // heads))
    if size % 2:
        fields.refuse("head_dim", f"is {size}: an even number is needed to rotate it")
    return size
