"""Every packaging of a drafter, with random weights, as its own code would have written it.

The files are for a tiny target of 3 layers, width 48 and 97 ids. What each means is written beside
it in plain values (`Meaning`), never taken from the code that reads them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, TARGET_HIDDEN, TARGET_LAYERS = 97, 48, 3
HIDDEN, FFN, HEADS, KV_HEADS, SIZE = 48, 80, 4, 2, 16
MASK, THETA, EPS = 3, 5000.0, 1e-5
YARN = {
    "rope_type": "yarn",
    "rope_theta": THETA,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Sees(NamedTuple):
    """What a layer sees."""

    causal: bool = False
    window: int | None = None
    from_anchor: bool = False


@dataclass(kw_only=True)
class Meaning:
    """What a file means."""

    family: str = "dflash"
    taps: tuple[int, ...] = (0, 1)
    width: int = 6
    first_slot: int = 1
    depth: int = 5
    layers: tuple[Sees, ...] = (Sees(), Sees())
    hidden: int = HIDDEN
    yarn: bool = False
    interleaved: bool = False
    embedding_scale: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None
    value_scale: float = 1.0
    own_embedding: bool = False
    own_head: bool = False
    ids: list[int] | None = None
    conv_group: int | None = None
    selector: tuple[int, int] | None = None
    """Rank and candidates."""
    markov: tuple[str, int] | None = None
    """Kind and rank."""
    confidence: bool | None = None
    """Whether it reads the Markov embedding; None without one."""


@dataclass(kw_only=True)
class Fixture:
    """A checkpoint."""

    config: dict[str, Any]
    meaning: Meaning
    bias: bool = False
    renamed: dict[str, str] = field(default_factory=dict)
    """Prefixes of normalised names and what the file writes instead."""
    more: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the file that are no weights."""

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """The weights under normalised names; norms are far from one."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in weight_shapes(self.meaning, self.bias).items():
            values = torch.randn(shape, generator=generator)
            is_norm = "norm" in name and len(shape) == 1
            tensors[name] = 1 + 0.3 * values if is_norm else 0.2 * values
        return tensors

    def file_tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """The tensors as the file has them."""
        named = {}
        for name, value in self.tensors(seed).items():
            for prefix, other in self.renamed.items():
                if name.startswith(prefix):
                    name = other + name.removeprefix(prefix)
            named[name] = value
        return named | self.more

    def write(self, path: Path, seed: int = 0) -> Path:
        """Write the checkpoint directory."""
        return write(path, self.config, self.file_tensors(seed))


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write any checkpoint directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return path


def weight_shapes(meaning: Meaning, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """All weights of a drafter that means this."""
    hidden, queries, keys = meaning.hidden, HEADS * SIZE, KV_HEADS * SIZE
    rows = VOCAB if meaning.ids is None else len(meaning.ids)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden), "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (SIZE,), "self_attn.k_norm.weight": (SIZE,),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (FFN, hidden), "mlp.up_proj.weight": (FFN, hidden),
        "mlp.down_proj.weight": (hidden, FFN),
    }  # fmt: skip
    if bias:
        layer |= {
            f"self_attn.{n}_proj.bias": (s,)
            for n, s in zip("qkv", (queries, keys, keys), strict=True)
        }
        layer["self_attn.o_proj.bias"] = (hidden,)
    if meaning.conv_group:
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, 2, hidden)
            layer[f"{name}.kernel_projection.weight"] = (4 * hidden // meaning.conv_group, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(meaning.taps) * TARGET_HIDDEN),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for number in range(len(meaning.layers)):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    if meaning.own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
    if meaning.own_head:
        shapes["lm_head.weight"] = (rows, hidden)
    if meaning.selector:
        rank = meaning.selector[0]
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        shapes["candidate_selector.predecessor_codebook"] = (VOCAB, rank)
        shapes["candidate_selector.successor_codebook"] = (VOCAB, rank)
    return shapes | _head_shapes(meaning, rows)


def _head_shapes(meaning: Meaning, rows: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    kind, rank = meaning.markov or (None, 0)
    if kind:
        shapes["markov_head.markov_w1.weight"] = (VOCAB, rank)
        shapes["markov_head.markov_w2.weight"] = (rows, rank)
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, meaning.hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + meaning.hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if meaning.confidence is not None:
        width = meaning.hidden + (rank if meaning.confidence else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def layer_config(num_layers: int = 2, **changes: Any) -> dict[str, Any]:
    """The Qwen3 part of a configuration; a change to None takes a key out."""
    config = {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": num_layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "vocab_size": VOCAB,
        "rms_norm_eps": EPS, "hidden_act": "silu", "attention_bias": False, "rope_theta": THETA,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    return {key: value for key, value in (config | changes).items() if value is not None}


def sliding(*kinds: int, window: int) -> dict[str, Any]:
    """Layer types, 1 for a sliding layer."""
    names = ("full_attention", "sliding_attention")
    return {
        "layer_types": [names[kind] for kind in kinds],
        "sliding_window": window,
        "use_sliding_window": True,
    }


def _zlab(num_layers: int = 2, nested: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    options = {"target_layer_ids": [0, 1], "mask_token_id": MASK} | (nested or {})
    return layer_config(
        num_layers, **{"architectures": ["DFlashDraftModel"], "num_target_layers": 3} | top
    ) | {"dflash_config": options}


def _old() -> Fixture:
    return Fixture(config=_zlab(block_size=6), meaning=Meaning())


def _new() -> Fixture:
    config = _zlab(
        1,
        {"block_size": 4, "target_layer_ids": [2, 0, 1]},
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    meaning = Meaning(taps=(2, 0, 1), width=4, depth=3, layers=(Sees(),))
    return Fixture(config=config, meaning=meaning)


def _mixed() -> Fixture:
    config = _zlab(
        3, {"block_size": 6}, rope_theta=None, rope_parameters=YARN, **sliding(1, 1, 0, window=8)
    )
    narrow = Sees(causal=True, window=8)
    return Fixture(config=config, meaning=Meaning(layers=(narrow, narrow, Sees()), yarn=True))


def _scaled() -> Fixture:
    nested = {
        "block_size": 6, "input_embedding_scale": 2.5, "output_multiplier": 0.3,
        "final_logit_softcapping": 4.0, "attention_value_scale": 0.5,
    }  # fmt: skip
    meaning = Meaning(embedding_scale=2.5, multiplier=0.3, softcap=4.0, value_scale=0.5)
    return Fixture(config=_zlab(nested=nested), meaning=meaning)


def _interleaved() -> Fixture:
    config = _zlab(block_size=6, rope_is_neox_style=False)
    return Fixture(config=config, meaning=Meaning(interleaved=True))


def _bidirectional_windows() -> Fixture:
    config = _zlab(block_size=6, is_causal=False, **sliding(1, 0, window=5))
    return Fixture(config=config, meaning=Meaning(layers=(Sees(window=5), Sees())))


def _jetspec() -> Fixture:
    causal = Sees(causal=True)
    config = _zlab(nested={"causal_head": True}, block_size=6)
    return Fixture(config=config, meaning=Meaning(layers=(causal, causal)))


def _dflash2() -> Fixture:
    nested = {
        "block_size": 6, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5,
        "selector_top_k": 7,
    }  # fmt: skip
    config = _zlab(
        nested=nested,
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        **sliding(1, 1, window=9),
    )
    meaning = Meaning(family="dflash2", layers=(Sees(window=9),) * 2, conv_group=4, selector=(5, 7))
    return Fixture(config=config, meaning=meaning)


def _speculators(kind: str, count: int, layers: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {
        "architectures": [{"dflash2": "DFlash2DraftModel"}.get(kind, "DFlashSpeculator")],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
        "draft_vocab_size": VOCAB,
        "block_size": 6,
        "aux_hidden_state_layer_ids": [1, 2],
        "mask_token_id": MASK,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "verifier": {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]},
        },
        "dtype": "float32",
    } | top


REDUCED = [4, 5, 7, 8, 11, 12, 13, 20, 21, 22, 23, 31, 40, 41, 42, 43, 44, 60, 77, 90, 91, 96]
"""The target's ids that a reduced vocabulary has."""


def _maps() -> dict[str, Tensor]:
    ids = torch.tensor(REDUCED)
    marks = torch.zeros(VOCAB, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(len(REDUCED)), "t2d": marks}


def _speculators_dflash() -> Fixture:
    config = _speculators(
        "dflash",
        5,
        layer_config(**sliding(1, 0, window=7)),
        draft_vocab_size=len(REDUCED),
        sliding_window_non_causal=False,
        sample_from_anchor=False,
    )
    layers = (Sees(causal=True, window=7, from_anchor=True), Sees())
    meaning = Meaning(layers=layers, own_head=True, ids=REDUCED)
    return Fixture(config=config, meaning=meaning, more=_maps())


def _speculators_dflash2() -> Fixture:
    config = _speculators(
        "dflash2",
        5,
        layer_config(**sliding(1, 1, window=9)),
        conv_group_size=4,
        selector_rank=5,
        selector_top_k=7,
    )
    meaning = Meaning(
        family="dflash2",
        layers=(Sees(window=9, from_anchor=True),) * 2,
        conv_group=4,
        selector=(5, 7),
    )
    return Fixture(config=config, meaning=meaning)


def _speculators_dspark() -> Fixture:
    config = _speculators(
        "dspark", 6, layer_config(), sample_from_anchor=True, markov_rank=5,
        markov_head_type="gated",
    )  # fmt: skip
    meaning = Meaning(family="dspark", first_slot=0, depth=6, markov=("gated", 5), confidence=True)
    return Fixture(config=config, meaning=meaning)


def _speculators_dspark_old() -> Fixture:
    """Older than `sample_from_anchor`, with a reduced vocabulary: one slot is the anchor's."""
    config = _speculators(
        "dspark", 5, layer_config(), markov_rank=5, enable_confidence_head=False,
        draft_vocab_size=len(REDUCED),
    )  # fmt: skip
    meaning = Meaning(family="dspark", markov=("vanilla", 5), own_head=True, ids=REDUCED)
    return Fixture(config=config, meaning=meaning, more=_maps())


def _deepspec(**top: Any) -> dict[str, Any]:
    return layer_config(
        **{
            "architectures": ["Qwen3DSparkModel"],
            "num_target_layers": 3,
            "block_size": 6,
            "target_layer_ids": [-1, 1],
            "mask_token_id": MASK,
            "num_anchors": 512,
            "markov_rank": 0,
            "enable_confidence_head": False,
            "layer_types": ["full_attention", "full_attention"],
        }
        | top
    )


def _block7() -> Fixture:
    """A copy of a configuration of Qwen3.5's: what it says of partial rotation is noise."""
    config = _deepspec(
        block_size=7,
        attention_bias=True,
        rope_theta=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": 0.25,
        },
    )
    meaning = Meaning(
        taps=(-1, 1), width=7, first_slot=0, depth=7, own_embedding=True, own_head=True
    )
    return Fixture(config=config, meaning=meaning, bias=True)


def _block7_relabelled() -> Fixture:
    fixture = _block7()
    fixture.config["architectures"] = ["DFlashDraftModel"]
    return fixture


def _block7_narrow() -> Fixture:
    """A drafter of another width than its target."""
    fixture = _block7()
    fixture.config |= {"hidden_size": 40, "target_hidden_size": TARGET_HIDDEN}
    fixture.meaning.hidden = 40
    return fixture


def _deepspec_dspark() -> Fixture:
    config = _deepspec(
        target_layer_ids=[0, 1, 2], markov_rank=5, markov_head_type="rnn",
        enable_confidence_head=True, confidence_head_with_markov=True,
    )  # fmt: skip
    meaning = Meaning(
        family="dspark", taps=(0, 1, 2), first_slot=0, depth=6, own_embedding=True, own_head=True,
        markov=("rnn", 5), confidence=True,
    )  # fmt: skip
    return Fixture(config=config, meaning=meaning)


def _specforge() -> Fixture:
    nested = {
        "projector_type": "dspark", "markov_rank": 5, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": False,
    }  # fmt: skip
    config = _zlab(
        nested=nested,
        architectures=["DSparkDraftModel"],
        block_size=6,
        rope_theta=None,
        rope_parameters=YARN,
    )
    meaning = Meaning(
        family="dspark", first_slot=0, depth=6, yarn=True, markov=("vanilla", 5), confidence=False
    )
    renamed = {"markov_head.": "logit_head.markov_head.", "confidence_head.": "confidence_head."}
    return Fixture(config=config, meaning=meaning, renamed=renamed)


def _lfm2() -> Fixture:
    config = _zlab(
        architectures=["Lfm2DSparkDraftModel"], block_size=6, rope_is_neox_style=False,
        markov_rank=5, markov_head_type="vanilla", enable_confidence_head=False,
    )  # fmt: skip
    meaning = Meaning(
        family="dspark", first_slot=0, depth=6, interleaved=True, markov=("vanilla", 5)
    )
    return Fixture(config=config, meaning=meaning)


def _nemotron() -> Fixture:
    config = _deepspec(
        target_layer_ids=[0, 2], sliding_window=8, markov_rank=5, markov_head_type="vanilla",
        layer_types=None, sample_from_anchor=False, has_embed_tokens=False, has_lm_head=False,
    ) | {"dflash_config": {"dflash_query_causal": True}}  # fmt: skip
    layer = Sees(causal=True, window=8)
    meaning = Meaning(family="dspark", taps=(0, 2), layers=(layer, layer), markov=("vanilla", 5))
    return Fixture(config=config, meaning=meaning)


PACKAGINGS: dict[str, Callable[[], Fixture]] = {
    "z-lab, old": _old,
    "z-lab, new, more taps than layers": _new,
    "z-lab, mixed windows, yarn": _mixed,
    "z-lab, scales and softcap": _scaled,
    "z-lab, interleaved rope": _interleaved,
    "z-lab, bidirectional windows": _bidirectional_windows,
    "JetSpec": _jetspec,
    "DFlash 2": _dflash2,
    "speculators dflash, reduced vocabulary": _speculators_dflash,
    "speculators dflash2": _speculators_dflash2,
    "speculators dspark": _speculators_dspark,
    "speculators dspark, old": _speculators_dspark_old,
    "DeepSpec dflash_block7": _block7,
    "DeepSpec dflash_block7, relabelled": _block7_relabelled,
    "DeepSpec dflash_block7, narrower than its target": _block7_narrow,
    "DeepSpec DSpark": _deepspec_dspark,
    "SpecForge dspark": _specforge,
    "LFM2": _lfm2,
    "Nemotron": _nemotron,
}
"""What makes each."""
