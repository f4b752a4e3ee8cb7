"""Parity with the public implementations: same files, same hidden states and logits.

`dflash` (z-lab) computes z-lab's packagings, `speculators` (vLLM) its own. Both are installed
without their dependencies, which pin other versions of what is here; `drafter_reference` covers
every packaging, those without an installable reference included.
"""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_fixtures import MASK, PACKAGINGS, Fixture
from test_drafter_formats import observed_rows, random_contexts
from tiny import tiny_target
from torch import Tensor

from bastion_batch.engine.drafters.formats import describe_directory
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.errors import ModelError

ZLAB = [name for name in PACKAGINGS if name.startswith(("z-lab", "DFlash 2"))]
UNKNOWN_TO_ZLAB = ("z-lab, interleaved rope",)
"""What z-lab's own code does not compute: other implementations' files in its format."""
SPECULATORS = [name for name in PACKAGINGS if name.startswith("speculators")]


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def ours(fixture: Fixture, path: Path, target, contexts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden states `[R, W, E]` and logits `[R, W, U]`."""
    drafter = load_drafter(path, target)
    rows = observed_rows(drafter, contexts)
    with torch.inference_mode():
        blocks = drafter.blocks(rows)
        hidden = blocks.hidden_SE.unflatten(0, (len(rows), -1))[np.argsort(blocks.order)]
        return hidden, drafter.block_logits(rows)


def blocks_of(count: int, width: int) -> Tensor:
    """The ids of the blocks of `observed_rows`."""
    ids = torch.full((count, width), MASK)
    ids[:, 0] = 11 + 7 * torch.arange(count)
    return ids


@pytest.mark.parametrize("name", [name for name in ZLAB if name not in UNKNOWN_TO_ZLAB])
def test_zlabs_code_computes_the_same(name, target, tmp_path):
    reference = pytest.importorskip("dflash.model")
    fixture = PACKAGINGS[name]()
    fixture.config["dflash_config"].pop("attention_value_scale", None)  # vLLM's, not z-lab's
    path = fixture.write(tmp_path / "drafter")
    kind = getattr(reference, fixture.config["architectures"][0])
    model = kind.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").eval()
    meaning, contexts = fixture.meaning, random_contexts(len(fixture.meaning.taps))
    assert tuple(model.target_layer_ids) == meaning.taps
    assert model.block_size == meaning.width
    hidden, logits = ours(fixture, path, target, contexts)
    blocks = blocks_of(len(contexts), meaning.width)
    for place, features in enumerate(contexts):
        embedded = target.embedding[blocks[place]][None] * meaning.embedding_scale
        positions = torch.arange(len(features) + meaning.width)[None]
        with torch.inference_mode():
            expected = model(
                position_ids=positions, noise_embedding=embedded, target_hidden=features[None]
            )
            expected_logits = model.compute_logits(expected, lambda h: h @ target.head_weight.T)
        torch.testing.assert_close(hidden[place], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[place], expected_logits[0], rtol=1e-4, atol=2e-4)


@pytest.fixture(scope="module")
def speculators():
    """The model classes, imported once: their import warns of torch's own old interfaces."""
    pytest.importorskip("speculators")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from speculators.models.dflash.core import DFlashDraftModel
        from speculators.models.dflash2.core import DFlash2DraftModel
        from speculators.models.dspark.core import DSparkDraftModel

        return {
            "dflash": DFlashDraftModel,
            "dflash2": DFlash2DraftModel,
            "dspark": DSparkDraftModel,
        }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_code_computes_the_same(name, speculators, target, tmp_path):
    """Its own forward of training: one anchor after the context, its block beside the sequence."""
    fixture = PACKAGINGS[name]()
    path = fixture.write(tmp_path / "drafter")
    kind = speculators[fixture.config["speculators_model_type"]]
    config = kind.config_class.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # its own would be compiled
    model = kind.from_pretrained(path, config=config, dtype=torch.float64).eval()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.embedding)
        if not fixture.meaning.own_head:
            model.lm_head.weight.copy_(target.head_weight)
    contexts = random_contexts(len(fixture.meaning.taps))
    hidden, logits = ours(fixture, path, target, contexts)
    for place, features in enumerate(contexts):
        found = anchored(model, fixture, features, root=11 + 7 * place)
        torch.testing.assert_close(hidden[place], found[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[place], found[1], rtol=1e-4, atol=2e-4)


def anchored(model, fixture: Fixture, features: Tensor, root: int) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of the block whose anchor follows the features."""
    anchor, width = len(features), fixture.meaning.width
    length = anchor + 2 * width
    states = torch.zeros(1, length, features.shape[1], dtype=torch.float64)
    states[0, :anchor] = features
    ids = torch.ones(1, length, dtype=torch.int64)
    ids[0, anchor] = root
    is_anchor = torch.zeros(1, length, dtype=torch.int64)
    is_anchor[0, anchor] = 1
    with torch.inference_mode():
        hidden, logits, *_ = model._backbone_forward(
            states,
            ids,
            is_anchor,
            torch.zeros(1, length, fixture.meaning.hidden, dtype=torch.float64),
            torch.zeros(1, length, dtype=torch.int64),
            max_anchors=1,
        )
    return hidden[0], logits[0]


def test_what_speculators_saves_is_what_the_fixtures_say(speculators, tmp_path):
    """Its own `save_pretrained` writes the keys and tensors that the fixtures have."""
    for name in SPECULATORS:
        fixture = PACKAGINGS[name]()
        path = fixture.write(tmp_path / name)
        saved = tmp_path / "saved"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = speculators[fixture.config["speculators_model_type"]].from_pretrained(path)
            model.save_pretrained(saved)
        if name == "speculators dspark, old":  # its default now says that slot 0 predicts
            with pytest.raises(ModelError, match="contradicts sample_from_anchor"):
                describe_directory(saved)
            continue
        again = describe_directory(saved)
        assert sorted(again.tensor_names) == sorted(fixture.tensors())
        assert (again.taps, again.depth) == (fixture.meaning.taps, fixture.meaning.depth)
        assert again.layers == describe_directory(path).layers
