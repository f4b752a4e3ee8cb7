"""The parts of training: anchors, loss, model, features and texts, each against something slower."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from io_jobs import make_job, run_all, write_jsonl
from safetensors.torch import load_file, save_file
from tiny import SIZES, tiny_module, tiny_target
from tokenizers import Tokenizer, models
from training_data import prompt_rows, write_output, write_target
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bastion_batch.config import InputConfig, OutputConfig
from bastion_batch.engine.checkpoints import load_tokenizer, resolve_target
from bastion_batch.engine.drafters import DraftRow
from bastion_batch.engine.drafters.formats import describe_directory
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.own_text import OwnText, read_texts, tap_features
from bastion_batch.errors import DataError, InputError, ModelError, OutputError
from bastion_batch.io.planning import open_plan
from bastion_batch.training.anchors import AnchorSampler, TextSpan
from bastion_batch.training.features import FeatureStore
from bastion_batch.training.loop import learning_rate
from bastion_batch.training.loss import HeadLoss, Labels, common_ids
from bastion_batch.training.model import BlockBatch, DrafterModel
from bastion_batch.training.optimizer import Optimizer
from bastion_batch.training.settings import (
    Recipe,
    Shape,
    default_taps,
    free_token_id,
    shape_for,
    shape_of,
)
from bastion_batch.training.start import load_drafter_weights, load_target_layers
from bastion_batch.training.state import RunFiles
from bastion_batch.training.texts import hold_out, read_completions, read_prompts

# Anchors


def sampler(landing_share=0.5, num_texts=2, seed=3):
    spans = [TextSpan(4, 4 + n) for n in (1, 5, 9, 30)]
    return AnchorSampler(
        spans, num_texts=num_texts, num_anchors=6, landing_share=landing_share, seed=seed
    )


def test_every_text_comes_once_in_an_epoch_and_in_another_order_in_the_next():
    one = sampler()
    epochs = [[one.draw(2 * e).numbers + one.draw(2 * e + 1).numbers for e in range(6)]]
    assert all(sorted(numbers) == [0, 1, 2, 3] for numbers in epochs[0])
    assert len({tuple(numbers) for numbers in epochs[0]}) > 1


def test_anchors_are_distinct_output_tokens_that_have_a_next_one():
    one = sampler()
    for step in range(20):
        for number, anchors in zip(*one.draw(step), strict=True):
            span = one._spans[number]
            assert len(anchors) == min(6, span.stop - span.first)
            assert (np.diff(anchors) > 0).all()
            assert span.first <= anchors[0]
            assert anchors[-1] < span.stop


def test_a_step_depends_on_its_number_and_the_landings_alone():
    one, other = sampler(), sampler()
    for step in range(5):
        blocks = one.draw(step)
        one.land(blocks, [np.full(len(a), step % 3) for a in blocks.anchors])
    other.landed[:] = one.landed
    assert str(one.draw(8)) == str(other.draw(8))
    assert str(one.draw(8)) != str(sampler().draw(8))


def test_anchors_are_drawn_where_steps_landed():
    one = AnchorSampler([TextSpan(10, 110)], num_texts=1, num_anchors=10, landing_share=1.0, seed=0)
    blocks = one.draw(0)
    one.land(blocks, [np.full(10, 2)])
    expected = {a + 3 if a + 3 < 110 else 10 for a in blocks.anchors[0].tolist()}
    assert set(np.flatnonzero(one.landed) + 10) == expected
    assert expected <= set(one.draw(1).anchors[0].tolist())
    again = one.draw(1)
    one.land(again, [np.full(10, 200)])
    assert one.landed[0], "what reaches the end lands on the first anchor"


# The loss


def of_tokens(token_ids: torch.Tensor) -> Labels:
    nothing = torch.zeros(len(token_ids), 0)
    return Labels.mixed(token_ids, nothing.int(), nothing, 0.0)


@pytest.mark.parametrize("piece", [170, 1 << 24])
def test_the_loss_and_its_gradient_are_cross_entropys(piece):
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(50, 8, generator=generator)
    hidden = torch.randn(20, 8, generator=generator, requires_grad=True)
    labels = torch.randint(50, (20,), generator=generator)
    weights = torch.rand(20, generator=generator)
    scored = HeadLoss(head, None, 0, piece)(hidden, of_tokens(labels), weights, 0)
    (gradient,) = torch.autograd.grad(scored.loss * 3, hidden)
    plain = F.cross_entropy(hidden @ head.T, labels, reduction="none")
    expected = (plain * weights).sum() / weights.sum()
    torch.testing.assert_close(scored.loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected * 3, hidden)[0])
    assert scored.is_right_N.tolist() == ((hidden @ head.T).argmax(-1) == labels).tolist()


def test_a_label_may_be_the_targets_distribution_in_part():
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(50, 8, generator=generator)
    hidden = torch.randn(6, 8, generator=generator, requires_grad=True)
    tokens = torch.randint(50, (6,), generator=generator)
    best, ids = torch.rand(6, 50, generator=generator).topk(3)
    labels = Labels.mixed(tokens, ids.int(), best, 0.7)
    full = torch.zeros(6, 50).scatter_(1, ids, 0.7 * best / best.sum(-1, keepdim=True))
    full.scatter_add_(1, tokens[:, None], torch.full((6, 1), 0.3))
    expected = F.cross_entropy(hidden @ head.T, full)
    for part in (None, np.arange(5)):
        scored = HeadLoss(head, part, 0)(hidden, labels, torch.ones(6), 0)
        if part is None:
            torch.testing.assert_close(scored.loss, expected)
            (gradient,) = torch.autograd.grad(scored.loss, hidden)
            torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0])
        assert scored.is_right_N.shape == (6,)


def test_a_part_of_the_vocabulary_stands_for_the_whole():
    """The mean over many draws comes near the loss over all tokens."""
    generator = torch.Generator().manual_seed(1)
    head = 0.3 * torch.randn(400, 8, generator=generator)
    hidden, weights = torch.randn(30, 8, generator=generator), torch.ones(30)
    labels = torch.randint(400, (30,), generator=generator)
    labels = of_tokens(labels)
    whole = HeadLoss(head, None, 0)(hidden, labels, weights, 0).loss
    part = HeadLoss(head, common_ids(np.arange(400), 100), 0)
    losses = [part(hidden, labels, weights, step).loss.item() for step in range(60)]
    assert abs(np.mean(losses) - whole.item()) < 0.02
    assert losses[0] == part(hidden, labels, weights, 0).loss.item()


def test_common_ids_are_those_that_occur_most():
    assert common_ids(np.array([0, 5, 2, 5, 1]), 3).tolist() == [1, 2, 3]


# The model


def shape_for_tiny(**changes) -> Shape:
    values = {
        "num_layers": 2, "block_size": 5, "taps": (0, 2), "mask_token_id": 3, "hidden_size": 48,
        "ffn_size": 80, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "norm_eps": 1e-6,
        "rope_theta": 5000.0, "max_positions": 512, "vocab_size": 97, "num_target_layers": 3,
    }  # fmt: skip
    return Shape(**(values | changes))


def random_model(shape: Shape) -> DrafterModel:
    torch.manual_seed(5)
    model = DrafterModel(shape)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.3 * noise if parameter.ndim == 1 else 0.2 * noise
        parameter.data = parameter.data.bfloat16().float()  # what a file holds
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biases"])
def blocks(request):
    """Two texts with two anchors each, their features, and what the model makes of them."""
    target = tiny_target("llama", dtype=torch.float32)
    model = random_model(shape_for_tiny(attention_bias=request.param))
    generator = torch.Generator().manual_seed(2)
    texts = [
        OwnText((), tuple(torch.randint(4, 97, (n,), generator=generator).tolist()))
        for n in (14, 9)
    ]
    features = tap_features(target, texts, model.shape.taps)
    anchors = torch.tensor([[4, 11], [2, 7]])
    ids = torch.full((2, 2, 5), 3)
    for row, text in enumerate(texts):
        ids[row, :, 0] = torch.tensor(text.token_ids)[anchors[row]]
    with torch.no_grad():
        hidden = model(
            BlockBatch(
                torch.nn.utils.rnn.pad_sequence([f.clone() for f in features], batch_first=True),
                anchors,
                F.embedding(ids.flatten(1), target.embedding),
            )
        )
    return target, model, texts, features, anchors, hidden


def test_the_model_computes_what_the_engine_does(blocks, tmp_path):
    target, model, texts, features, anchors, hidden = blocks
    RunFiles(tmp_path).write_drafter(tmp_path, model)
    drafter = load_drafter(tmp_path, target)
    for row, text in enumerate(texts):
        for place, anchor in enumerate(anchors[row].tolist()):
            drafter.observe([1], [anchor], features[row][:anchor])
            drafted = drafter.draft([DraftRow(1, text.token_ids[: anchor + 1], 4)])
            drafter.forget(1)
            logits = target.logits(hidden[row, place])
            logits[:, model.shape.mask_token_id] = -torch.inf  # never a candidate
            expected = logits.log_softmax(-1)
            ids = torch.from_numpy(drafted.token_ids_RDK[0])
            found = torch.from_numpy(drafted.log_probs_RDK[0])
            torch.testing.assert_close(found, expected.gather(1, ids), atol=2e-4, rtol=1e-4)


def test_its_file_is_read_by_zlabs_code(blocks, tmp_path):
    reference = pytest.importorskip("dflash.model")
    target, model, texts, features, anchors, hidden = blocks
    RunFiles(tmp_path).write_drafter(tmp_path, model)
    theirs = reference.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert (theirs.block_size, theirs.mask_token_id) == (5, 3)
    for row, text in enumerate(texts):
        for place, anchor in enumerate(anchors[row].tolist()):
            ids = torch.tensor([[text.token_ids[anchor], 3, 3, 3, 3]])
            with torch.no_grad():
                out = theirs(
                    position_ids=torch.arange(anchor + 5)[None],
                    noise_embedding=F.embedding(ids, target.embedding),
                    target_hidden=features[row][None, :anchor].clone(),
                )
            torch.testing.assert_close(out[0, 1:], hidden[row, place], atol=1e-4, rtol=1e-4)


def test_a_new_drafter_begins_with_the_targets_last_layers(tmp_path):
    tiny_module("qwen3", dtype=torch.float32).save_pretrained(tmp_path)
    shape = shape_for_tiny(ffn_size=96, num_q_heads=6, head_dim=8)
    model = DrafterModel(shape)
    load_target_layers(model, tmp_path, 0)
    theirs = tiny_module("qwen3", dtype=torch.float32).state_dict()
    for ours, source in (("layers.0", "model.layers.1"), ("layers.1", "model.layers.2")):
        for name in ("self_attn.q_proj", "self_attn.k_norm", "mlp.down_proj", "input_layernorm"):
            expected = theirs[f"{source}.{name}.weight"]
            assert torch.equal(model.state_dict()[f"{ours}.{name}.weight"], expected)
    with pytest.raises(ModelError, match=r"self_attn\.q_proj\.weight is \[48, 48\]"):
        load_target_layers(DrafterModel(shape_for_tiny(ffn_size=96)), tmp_path, 0)


def test_biases_of_a_targets_layers_are_carried(tmp_path):
    torch.manual_seed(4)
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    module = Qwen2ForCausalLM(Qwen2Config(vocab_size=97, **sizes))
    theirs = {k: torch.randn_like(v) for k, v in module.state_dict().items()}
    module.load_state_dict(theirs)
    module.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shape = shape_for(config, num_layers=1, block_size=4, mask_token_id=3)
    assert shape.to_config()["attention_bias"]
    model = DrafterModel(shape)
    load_target_layers(model, tmp_path, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        expected = theirs[f"model.layers.2.self_attn.{name}.bias"]
        assert torch.equal(model.state_dict()[f"layers.0.self_attn.{name}.bias"], expected)
    assert not model.state_dict()["layers.0.self_attn.o_proj.bias"].any()


def test_training_goes_on_from_a_drafter_in_several_files(tmp_path):
    model = random_model(shape_for_tiny(attention_bias=True))
    RunFiles(tmp_path).write_drafter(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({k: v for k, v in tensors.items() if names[k] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert shape_of(describe_directory(tmp_path), 3) == model.shape
    other = DrafterModel(model.shape)
    load_drafter_weights(other, tmp_path)
    assert all(torch.equal(other.state_dict()[k], v) for k, v in model.state_dict().items())


# Features and texts


def test_features_are_computed_once_and_kept_up_to_the_cap(tmp_path):
    target = tiny_target("llama", dtype=torch.float32)
    texts = [OwnText((5, 6), tuple(range(7, 7 + n))) for n in (3, 8, 4)]
    expected = tap_features(target, texts, (0, 2))
    rounding = {"rtol": 1e-4, "atol": 1e-3}  # as many texts as are read together round together
    cap = 4 * 96 * (5 + 10)  # the first two texts
    store = FeatureStore(tmp_path, texts, target, (0, 2), cap)
    assert store.num_kept == 2
    for numbers in ([2, 0, 2], [0, 1, 2]):
        for number, features in zip(numbers, store.of(numbers), strict=True):
            torch.testing.assert_close(features.taps_SF, expected[number], **rounding)
    assert (tmp_path / "features.bin").stat().st_size == cap
    store.save()
    other = FeatureStore(tmp_path, texts, target, (0, 2), cap)
    assert other._known.all(), "known to the next run"
    torch.testing.assert_close(other.of([1])[0].taps_SF, expected[1], **rounding)


def test_next_tokens_are_the_targets_and_kept_beside_the_taps(tmp_path):
    target = tiny_target("llama", dtype=torch.float32)
    texts = [OwnText((5, 6), tuple(range(7, 7 + n))) for n in (3, 8)]
    hidden = [reading.hidden_SE for reading in read_texts(target, texts, (0, 2))]
    cap = (4 * 96 + 8 * 3) * 5  # the first text
    store = FeatureStore(tmp_path, texts, target, (0, 2), cap, num_next=3)
    assert store.num_kept == 1
    for _ in range(2):
        for states, lesson in zip(hidden, store.of([0, 1]), strict=True):
            best, ids = target.logits(states).softmax(-1).topk(3)
            assert lesson.next_ids_SK[1:].tolist() == ids[1:].tolist(), "after the prompt"
            torch.testing.assert_close(lesson.next_probabilities_SK[1:], best[1:])
    store.save()
    other = FeatureStore(tmp_path, texts, target, (0, 2), cap, num_next=3)
    assert other._known.all()
    assert torch.equal(other.of([0])[0].next_ids_SK, store.of([0])[0].next_ids_SK)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


def test_texts_are_the_same_with_and_without_token_ids(checkpoint, tmp_path):
    target, tokenizer = resolve_target(str(checkpoint)), load_tokenizer(checkpoint)
    kept = write_output(tmp_path / "ids", checkpoint, 6, 12)
    bare = write_output(tmp_path / "text", checkpoint, 6, 12, output__output_token_ids=False)
    found = read_completions(OutputConfig(path=str(kept)), tokenizer, target, 1000)
    assert len(found.texts) == 6
    prompts = [row["prompt"] for row in prompt_rows(6)]
    assert [tokenizer.decode(text.prompt_ids) for text in found.texts] == prompts
    again = read_completions(OutputConfig(path=str(bare)), tokenizer, target, 1000)
    for one, other in zip(found.texts, again.texts, strict=True):
        assert one.prompt_ids == other.prompt_ids
        # bytes that are no UTF-8 do not survive as text
        assert len(other.output_ids) > 0
    cut = read_completions(OutputConfig(path=str(kept)), tokenizer, target, 20)
    assert max(len(text.token_ids) for text in cut.texts) <= 20
    assert cut.digest != found.digest


def test_completions_of_another_target_are_refused(checkpoint, tmp_path):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(3))
    job = make_job(prompts, tmp_path / "out")

    class Other:
        digest = "another"

    plan = open_plan(job, Other())
    run_all(job.output, plan)
    files = resolve_target(str(checkpoint))
    with pytest.raises(OutputError, match="digest another"):
        read_completions(job.output, load_tokenizer(checkpoint), files, 100)


def test_held_out_prompts_are_read_from_a_dataset(checkpoint, tmp_path):
    file = write_jsonl(tmp_path / "held.jsonl", [*prompt_rows(5), {"prompt": None, "id": 1}])
    source = InputConfig(path=str(file), prompt="prompt")
    files, tokenizer = resolve_target(str(checkpoint)), load_tokenizer(checkpoint)
    assert len(read_prompts(source, tokenizer, files, 3)) == 3
    assert len(read_prompts(source, tokenizer, files, 100)) == 5


def test_prompts_are_held_out_evenly_with_all_their_completions():
    texts = [OwnText((n % 50,), (n, n)) for n in range(100)]
    kept, held = hold_out(texts, 10)
    assert len(held) == len(set(held)) == 10
    assert not {text.prompt_ids for text in kept} & set(held)
    assert len(kept) == 80
    assert len(hold_out(texts[:4], 10)[1]) == 2
    with pytest.raises(DataError, match=r"2 completions are of 1 prompt.*--held-out"):
        hold_out(texts[::50], 1)


# Settings


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_an_optimizer_that_is_restored_takes_the_same_steps(name):
    def fresh():
        torch.manual_seed(0)
        return torch.nn.Linear(6, 4)

    def step(model, optimizer, seed):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.clip(1.0)
        optimizer.step(0.01)

    whole, interrupted, resumed = fresh(), fresh(), fresh()
    first, second, third = (Optimizer(m, name, 0.01) for m in (whole, interrupted, resumed))
    for seed in range(4):
        step(whole, first, seed)
    step(interrupted, second, 0)
    step(interrupted, second, 1)
    for old, new in zip(interrupted.parameters(), resumed.parameters(), strict=True):
        new.data.copy_(old.data)
        third.restore(new, {key: value.clone() for key, value in second.state_of(old).items()})
    step(resumed, third, 2)
    step(resumed, third, 3)
    assert torch.equal(resumed.weight, whole.weight)
    assert torch.equal(resumed.bias, whole.bias)
    assert not torch.equal(interrupted.weight, whole.weight)


def test_muon_moves_matrices_and_adamw_the_rest():
    model = torch.nn.Linear(6, 4)
    for name, of_matrices in (("muon", {"momentum_buffer"}), ("adamw", {"exp_avg", "exp_avg_sq"})):
        optimizer = Optimizer(model, name, 0.01)
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step(0.01)
        assert optimizer.state_of(model.weight).keys() - {"step"} == of_matrices
        assert optimizer.state_of(model.bias).keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_default_taps_spread_over_the_target():
    assert default_taps(30) == (1, 8, 14, 20, 27)
    assert default_taps(2) == (0, 1)


@pytest.mark.parametrize("num_layers", range(1, 13))
def test_default_taps_of_any_target_are_rising_layers_of_it(num_layers):
    taps = default_taps(num_layers)
    assert len(taps) == min(5, num_layers)
    assert all(a < b for a, b in pairwise((-1, *taps, num_layers)))
    shape_for_tiny(taps=taps, num_target_layers=num_layers).require_usable()


def test_a_free_token_is_found_beyond_the_tokenizer_or_among_its_spare_ones(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    assert free_token_id(tokenizer, 300, checkpoint) == len(tokenizer)
    with pytest.raises(ModelError, match="--mask-token-id"):
        free_token_id(tokenizer, len(tokenizer), checkpoint)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<spare>"]})
    assert free_token_id(tokenizer, len(tokenizer), checkpoint) == len(tokenizer) - 1


def test_a_free_token_lies_beyond_the_highest_id_where_ids_have_gaps():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert len(tokenizer) == 2
    assert free_token_id(tokenizer, 10, Path("config.json")) == 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"taps": (0, 3)}, "taps are"),
        ({"taps": ()}, "taps are"),
        ({"mask_token_id": 97}, "mask token id is 97"),
        ({"block_size": 1}, "block size is 1"),
        ({"num_layers": 0}, "layers is 0"),
    ],
)
def test_a_shape_that_cannot_be_trained_is_refused(changes, named):
    with pytest.raises(InputError, match=named):
        shape_for_tiny(**changes).require_usable()


def test_the_learning_rate_rises_and_falls():
    recipe = Recipe(steps=100, warmup_share=0.1, learning_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert rates[-1] < 0.001


def test_the_configuration_says_what_the_shape_is():
    config = json.loads(json.dumps(shape_for_tiny().to_config()))
    assert config["dflash_config"] == {"target_layer_ids": [0, 2], "mask_token_id": 3}
    assert config["block_size"] == 5
