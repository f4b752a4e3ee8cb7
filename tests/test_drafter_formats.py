"""Every packaging loads as what it means, and everything else is refused by name."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drafter_fixtures import (
    PACKAGINGS,
    TARGET_HIDDEN,
    VOCAB,
    Fixture,
    Sees,
    layer_config,
    sliding,
    write,
)
from drafter_reference import reference_block
from tiny import tiny_target
from torch import Tensor

from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.description import DrafterDescription, LayerAttention
from bastion_batch.engine.drafters.formats import describe_directory
from bastion_batch.engine.drafters.formats.speculators import LAYER_DEFAULTS
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.errors import ModelError

CONTEXTS = (3, 23, 14)
"""Context lengths: inside and beyond the windows of the fixtures."""


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.mark.parametrize("name", PACKAGINGS)
def test_a_packaging_is_read_as_what_it_means(name, tmp_path):
    fixture = PACKAGINGS[name]()
    meaning = fixture.meaning
    found = describe_directory(fixture.write(tmp_path / "drafter"))
    assert found.family == meaning.family
    assert found.taps == meaning.taps
    assert found.block_width == meaning.width
    assert found.first_prediction_slot == meaning.first_slot
    assert found.depth == meaning.depth
    layers = [(a.causal, a.window, a.window_origin == "anchor") for a in found.layers]
    assert [Sees(*layer) for layer in layers] == list(meaning.layers)
    ids = None if found.target_ids_U is None else found.target_ids_U.tolist()
    assert ids == meaning.ids
    selector = found.selector and (found.selector.rank, found.selector.num_candidates)
    assert selector == meaning.selector
    assert (found.markov and (found.markov.kind, found.markov.rank)) == meaning.markov
    assert (found.confidence and found.confidence.with_markov) == meaning.confidence
    assert sorted(found.tensor_names.values()) == sorted(fixture.tensors())


@pytest.mark.parametrize("name", PACKAGINGS)
def test_a_packaging_computes_what_it_means(name, target, tmp_path):
    """Hidden states and logits of every slot, for ragged rows, against the plain reference."""
    fixture = PACKAGINGS[name]()
    drafter = load_drafter(fixture.write(tmp_path / "drafter"), target)
    contexts = random_contexts(len(fixture.meaning.taps))
    rows = observed_rows(drafter, contexts)
    with torch.inference_mode():
        blocks = drafter.blocks(rows)
        logits_RWU = drafter.block_logits(rows)
        drafted = drafter.draft(rows)
    hidden_RWE = blocks.hidden_SE.unflatten(0, (len(rows), -1))[np.argsort(blocks.order)]
    for place, (row, features) in enumerate(zip(rows, contexts, strict=True)):
        expected = reference_block(
            fixture.tensors(),
            fixture.meaning,
            features,
            row.token_ids[-1],
            embedding=target.embedding,
            head=target.head_weight,
        )
        torch.testing.assert_close(hidden_RWE[place], expected.hidden_WE, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits_RWU[place], expected.logits_WU, rtol=1e-4, atol=2e-4)
        first = fixture.meaning.first_slot
        best = expected.logits_WU[first : first + fixture.meaning.depth].clone()
        ids = torch.tensor(fixture.meaning.ids or range(VOCAB))
        best[:, ids == 3] = -torch.inf
        assert drafted.token_ids_RDK[place, :, 0].tolist() == ids[best.argmax(-1)].tolist()


def random_contexts(num_taps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = num_taps * TARGET_HIDDEN
    return [
        torch.randn(length, shape, generator=generator, dtype=torch.float64) for length in CONTEXTS
    ]


def observed_rows(drafter, contexts: list[Tensor]) -> list[DraftRow]:
    """Rows that have these features as their contexts."""
    keys = [7 * number for number in range(len(contexts))]
    with torch.inference_mode():
        drafter.observe(keys, [len(part) for part in contexts], torch.cat(contexts))
    return [
        DraftRow(key, [1] * len(part) + [11 + key], drafter.depth)
        for key, part in zip(keys, contexts, strict=True)
    ]


def draft_of(drafter, contexts: list[Tensor]) -> Marginals:
    with torch.inference_mode():
        return drafter.draft(observed_rows(drafter, contexts))


# What is refused


class Fault(NamedTuple):
    packaging: str
    spoil: Callable[[dict[str, Any], dict[str, Tensor]], None]
    match: str


def nested(**changes: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def spoil(config, tensors):
        config["dflash_config"] = without_none(config["dflash_config"] | changes)

    return spoil


def top(**changes: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def spoil(config, tensors):
        changed = without_none(config | changes)
        config.clear()
        config.update(changed)

    return spoil


def tensor(name: str, change: Callable[[Tensor | None], Tensor | None]):
    def spoil(config, tensors):
        value = change(tensors.pop(name, None))
        if value is not None:
            tensors[name] = value

    return spoil


def all_tensors(change: Callable[[Tensor], Tensor]):
    def spoil(config, tensors):
        for name in list(tensors):
            tensors[name] = change(tensors[name])

    return spoil


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


OLD, DFLASH2, BLOCK7 = "z-lab, old", "DFlash 2", "DeepSpec dflash_block7"
REDUCED, DSPARK = "speculators dflash, reduced vocabulary", "speculators dspark"

CORRUPTED = {
    "missing taps": Fault(OLD, nested(target_layer_ids=None), "target_layer_ids is missing"),
    "negative tap": Fault(OLD, nested(target_layer_ids=[0, -1]), "target_layer_ids holds -1"),
    "tap beyond": Fault(OLD, nested(target_layer_ids=[0, 3]), "target_layer_ids holds 3"),
    "wrong fc width": Fault(OLD, tensor("fc.weight", lambda fc: fc[:, 1:]), r"fc\.weight"),
    "extra tensor": Fault(
        OLD, tensor("norm.bias", lambda _: torch.zeros(48)), r"unclaimed.*norm\.bias"
    ),
    "missing mask id": Fault(OLD, nested(mask_token_id=None), "mask_token_id is missing"),
    "mask id beyond": Fault(OLD, nested(mask_token_id=VOCAB), "mask_token_id is 97"),
    "head without map": Fault(REDUCED, tensor("d2t", lambda _: None), "d2t is missing"),
    "unknown projector": Fault(OLD, nested(projector_type="warp"), "projector_type is 'warp'"),
    "float16": Fault(OLD, all_tensors(torch.Tensor.half), "dtype of .* is F16"),
}
"""The ten faults that a corrupted checkpoint is most likely to have."""

MORE_FAULTS = {
    "taps below the embedding": Fault(
        BLOCK7, top(target_layer_ids=[-2, 1]), "target_layer_ids holds -2"
    ),
    "a tap twice": Fault(OLD, nested(target_layer_ids=[1, 1]), "target_layer_ids.*twice"),
    "speculators tap beyond": Fault(
        REDUCED, top(aux_hidden_state_layer_ids=[1, 4]), "aux_hidden_state_layer_ids holds 4"
    ),
    "speculators without taps": Fault(
        DSPARK, top(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids is missing"
    ),
    "speculators without mask id": Fault(DSPARK, top(mask_token_id=None), "mask_token_id"),
    "speculators without layers": Fault(
        DSPARK, top(transformer_layer_config=None), "transformer_layer_config is missing"
    ),
    "contradictory slots": Fault(DSPARK, top(sample_from_anchor=False), "speculative_tokens 6"),
    "one prediction too few": Fault(
        REDUCED, top(sample_from_anchor=True), "speculative_tokens 5.*sample_from_anchor"
    ),
    "one prediction too many": Fault(DSPARK, top(block_size=5), "speculative_tokens 6"),
    "a map of another size": Fault(REDUCED, top(draft_vocab_size=21), "draft_vocab_size.*d2t"),
    "a map that is no offset": Fault(REDUCED, tensor("d2t", lambda d: d + 90), "d2t"),
    "maps that disagree": Fault(REDUCED, tensor("t2d", lambda t: ~t), "t2d"),
    "a map and a whole vocabulary": Fault(
        DSPARK, tensor("d2t", lambda _: torch.zeros(VOCAB, dtype=torch.int64)), "unclaimed.*d2t"
    ),
    "a missing codebook": Fault(
        DFLASH2,
        tensor("candidate_selector.successor_codebook", lambda _: None),
        r"missing.*candidate_selector\.successor_codebook",
    ),
    "no rank": Fault(DFLASH2, nested(selector_rank=None), "selector_rank is missing"),
    "groups that do not divide": Fault(DFLASH2, nested(conv_group_size=5), "conv_group_size"),
    "an unknown Markov head": Fault(DSPARK, top(markov_head_type="deep"), "markov_head_type"),
    "a Markov rank of nothing": Fault(
        "DeepSpec DSpark", top(markov_rank=None), "markov_rank is missing"
    ),
    "confidence without Markov": Fault(
        "SpecForge dspark",
        nested(markov_rank=0, confidence_head_with_markov=True),
        "confidence_head_with_markov",
    ),
    "slots unsaid": Fault("Nemotron", top(sample_from_anchor=None), "sample_from_anchor"),
    "sinks": Fault("Nemotron", top(attention_sink_bias=True), "attention_sink_bias"),
    "causal and not": Fault("JetSpec", top(is_causal=False), "causal_head"),
    "a shifted draft": Fault("JetSpec", nested(draft_shift=1), "draft_shift"),
    "a head that is missing": Fault(BLOCK7, tensor("lm_head.weight", lambda _: None), "lm_head"),
    "an embedding that is small": Fault(
        BLOCK7, tensor("embed_tokens.weight", lambda e: e[:-1]), r"embed_tokens\.weight"
    ),
    "too narrow": Fault("SpecForge dspark", top(target_hidden_size=40), "fc.weight"),
    "quantised": Fault(OLD, top(quantization_config={"quant_method": "fp8"}), "quantization"),
    "eight bits": Fault(OLD, all_tensors(lambda t: t.to(torch.int8)), "dtype of .* is I8"),
}

FULL_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
SLIDING_ROPE = FULL_ROPE | {"rope_theta": 9000.0}
BY_KIND = {"full_attention": FULL_ROPE, "sliding_attention": SLIDING_ROPE}

MORE_FAULTS |= {
    "attention of another kind": Fault(
        "SpecForge dspark", nested(attention_mode="mla"), r"dflash_config\.attention_mode is 'mla'"
    ),
    "two rotations": Fault(
        OLD, top(rope_parameters=BY_KIND), "rope_parameters differs between full_attention and"
    ),
    "a rotation of full layers only": Fault(
        OLD,
        top(rope_parameters={"full_attention": FULL_ROPE}),
        "rope_parameters has full_attention but no sliding_attention",
    ),
    "a nested partial rotation": Fault(
        OLD,
        top(rope_parameters={"sliding_attention": FULL_ROPE | {"partial_rotary_factor": 0.5}}),
        "partial_rotary_factor",
    ),
    "no epsilon": Fault(OLD, top(rms_norm_eps=None), ": rms_norm_eps is missing"),
}

FAMILIES = {
    "Domino": Fault(OLD, nested(projector_type="domino"), "Domino"),
    "Domino by its tensors": Fault(
        OLD, tensor("prefix_gru.weight_ih_l0", lambda _: torch.zeros(3)), "prefix_gru.*Domino"
    ),
    "XPress": Fault(DSPARK, top(speculators_model_type="xpress"), "XPress"),
    "EAGLE-3": Fault(DSPARK, top(speculators_model_type="eagle3"), "EAGLE-3"),
    "EAGLE-3 by its name": Fault(OLD, top(architectures=["LlamaForCausalLMEagle3"]), "EAGLE-3"),
    "EAGLE-3 by its tensors": Fault(
        OLD, tensor("midlayer.self_attn.q_proj.weight", lambda _: torch.zeros(3)), "EAGLE-3"
    ),
    "P-EAGLE": Fault(DSPARK, top(speculators_model_type="peagle"), "P-EAGLE"),
    "MTP": Fault(DSPARK, top(speculators_model_type="mtp"), "MTP"),
    "TiDAR": Fault(OLD, top(architectures=["TiDARForCausalLM"]), "TiDAR"),
    "Laguna, fused": Fault(
        OLD,
        tensor("layers.0.self_attn.qkv_proj.weight", lambda _: torch.zeros(3)),
        "Laguna.*fused",
    ),
    "Laguna, gated": Fault(
        OLD, tensor("layers.0.self_attn.g_proj.weight", lambda _: torch.zeros(3)), "Laguna.*gated"
    ),
    "Ornith": Fault(BLOCK7, top(architectures=["Qwen35DSparkModel"]), "gated DSpark"),
    "Ornith by its tensors": Fault(
        BLOCK7,
        tensor("layers.0.self_attn.q_proj.weight", lambda q: torch.cat([q, q])),
        "q_proj.*gated",
    ),
    "Gemma's layers": Fault(BLOCK7, top(model_type="gemma4_text"), "Gemma"),
    "inside a target": Fault(
        OLD, top(block_size=None, dspark_block_size=5), "dspark_block_size.*target's own"
    ),
    "log-SNR conditioning": Fault(BLOCK7, top(log_snr_conditioning=True), "log_snr_conditioning"),
    "an unknown speculator": Fault(DSPARK, top(speculators_model_type="warp"), "warp"),
}

ALL_FAULTS = CORRUPTED | MORE_FAULTS | FAMILIES


def spoilt(fault: Fault) -> tuple[Fixture, dict[str, Any], dict[str, Tensor]]:
    fixture = PACKAGINGS[fault.packaging]()
    config, tensors = fixture.config, fixture.file_tensors()
    fault.spoil(config, tensors)
    return fixture, config, tensors


@pytest.mark.parametrize("name", ALL_FAULTS)
def test_a_fault_is_refused_by_name(name, target, tmp_path):
    fault = ALL_FAULTS[name]
    _, config, tensors = spoilt(fault)
    with pytest.raises(ModelError, match=fault.match) as raised:
        load_drafter(write(tmp_path / "drafter", config, tensors), target)
    assert "drafter" in str(raised.value)


def test_a_gguf_drafter_is_refused_by_name(target, tmp_path):
    path = PACKAGINGS[OLD]().write(tmp_path / "drafter")
    (path / "model.safetensors").rename(path / "drafter.Q4_0.gguf")
    with pytest.raises(ModelError, match=r"GGUF.*drafter\.Q4_0\.gguf"):
        load_drafter(path, target)


@pytest.mark.parametrize("name", [OLD, DFLASH2, REDUCED, DSPARK, BLOCK7, "Nemotron"])
def test_no_tensor_can_be_missing(name, target, tmp_path):
    fixture = PACKAGINGS[name]()
    tensors = fixture.file_tensors()
    for missing in tensors:
        rest = {key: value for key, value in tensors.items() if key != missing}
        path = write(tmp_path / "drafter", fixture.config, rest)
        if missing == "t2d":  # says nothing that d2t does not
            continue
        with pytest.raises(ModelError, match=missing.removesuffix(".weight")):
            describe_directory(path)


@pytest.mark.parametrize("kind", LAYER_DEFAULTS)
def test_what_a_difference_leaves_out_is_transformers_default(kind):
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    values = {key: getattr(config, key, None) for key in LAYER_DEFAULTS[kind]}
    values["rope_theta"] = config.rope_parameters["rope_theta"]
    assert values == LAYER_DEFAULTS[kind]


def test_a_difference_from_the_defaults_is_read(tmp_path):
    fixture = PACKAGINGS[DSPARK]()
    del fixture.config["transformer_layer_config"]["rope_theta"]
    found = describe_directory(fixture.write(tmp_path / "drafter"))
    assert found.rope.parameters["rope_theta"] == 10_000


def described(name: str, path: Path, spoil: Callable) -> DrafterDescription:
    _, config, tensors = spoilt(Fault(name, spoil, ""))
    return describe_directory(write(path, config, tensors))


def test_sliding_layers_rotation_is_used_where_it_is_the_only_one(tmp_path):
    """`speculators` uses it for all layers whatever else there is."""
    slides = sliding(1, 1, window=5)
    found = described(OLD, tmp_path / "a", top(rope_parameters=BY_KIND, **slides))
    assert found.rope.parameters["rope_theta"] == 9000
    same = dict.fromkeys(BY_KIND, FULL_ROPE)
    found = described(OLD, tmp_path / "b", top(rope_parameters=same))
    assert found.rope.parameters["rope_theta"] == 5000
    layers = layer_config(rope_theta=None) | {"rope_parameters": BY_KIND}
    found = described(DSPARK, tmp_path / "c", top(transformer_layer_config=layers))
    assert found.rope.parameters["rope_theta"] == 9000


@pytest.mark.parametrize(
    ("said", "causal"),
    [({}, False), ({"causal": True}, True), ({"causal_head": True}, True)],
)
def test_what_is_said_about_all_layers_holds_for_windows_on_all(said, causal, tmp_path):
    windows = nested(use_swa=True, swa_window_size=5, **said)
    assert set(described(OLD, tmp_path / "a", windows).layers) == {LayerAttention(causal, 5)}

    def denied(config, tensors):
        windows(config, tensors)
        config["is_causal"] = False

    if not said.get("causal_head"):
        assert set(described(OLD, tmp_path / "b", denied).layers) == {LayerAttention(False, 5)}


def test_describing_needs_no_torch(tmp_path):
    """A coordinator refuses a drafter without importing what computes it."""
    paths = [PACKAGINGS[name]().write(tmp_path / name) for name in (OLD, DSPARK, BLOCK7)]
    code = (
        "import sys; from pathlib import Path\n"
        "from bastion_batch.engine.drafters.formats import describe_directory\n"
        f"for path in {[str(path) for path in paths]}: describe_directory(Path(path))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The target


def test_a_sharded_checkpoint_is_read(target, tmp_path):
    import json

    from safetensors.torch import save_file

    fixture = PACKAGINGS[OLD]()
    path = fixture.write(tmp_path / "drafter")
    (path / "model.safetensors").unlink()
    tensors, names = fixture.file_tensors(), {}
    for number, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({key: tensors[key] for key in part}, path / file)
        names |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    drafter = load_drafter(path, target)
    whole = load_drafter(fixture.write(tmp_path / "whole"), target)
    one, other = (draft_of(each, random_contexts(2)) for each in (drafter, whole))
    np.testing.assert_array_equal(one.token_ids_RDK, other.token_ids_RDK)


def test_a_copy_of_the_targets_embedding_and_head_is_not_kept(target, tmp_path):
    fixture = PACKAGINGS[BLOCK7]()
    tensors = fixture.file_tensors()
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head_weight}
    drafter = load_drafter(write(tmp_path / "drafter", fixture.config, tensors | copies), target)
    assert drafter._embedding is target.embedding
    assert drafter._own_head is None


def test_beside_a_float16_target_a_drafter_is_computed_in_bfloat16(tmp_path):
    half = tiny_target("qwen3", dtype=torch.float16)
    for name in (OLD, BLOCK7, REDUCED):
        drafter = load_drafter(PACKAGINGS[name]().write(tmp_path / "drafter"), half)
        assert drafter.caches[0].dtype == torch.bfloat16
        contexts = [part.half() for part in random_contexts(2)]
        drafted = draft_of(drafter, contexts)
        assert np.isfinite(drafted.log_probs_RDK[..., 0]).all()


def test_a_reduced_vocabulary_can_be_narrowed(target, tmp_path):
    fixture = PACKAGINGS[REDUCED]()
    path = fixture.write(tmp_path / "drafter")
    whole = draft_of(load_drafter(path, target), random_contexts(2))
    drafter = load_drafter(path, target)
    drafter.narrow(41)
    narrow = draft_of(drafter, random_contexts(2))
    allowed = [token for token in fixture.meaning.ids if token < 41]
    assert set(whole.token_ids_RDK.ravel().tolist()) <= set(fixture.meaning.ids)
    assert set(narrow.token_ids_RDK.ravel().tolist()) == set(allowed)
    for place in np.ndindex(narrow.token_ids_RDK.shape[:2]):
        kept = [token for token in whole.token_ids_RDK[place].tolist() if token < 41]
        assert narrow.token_ids_RDK[place].tolist()[: len(kept)] == kept
