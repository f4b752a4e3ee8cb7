"""The DFlash drafter against a slow reference: one row, one block, no cache, float64."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny import fixed_costs, requests, tiny_module, tiny_target
from torch import Tensor

from bastion_batch.engine import Engine
from bastion_batch.engine.attention import AttentionPlan, PassRow
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.dflash import NUM_RANKS, OLDEST_TOKENS, DFlashDrafter
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.drafters.pending import PLACES_PER_ROW
from bastion_batch.engine.target import Target
from bastion_batch.errors import ModelError
from bastion_batch.records import Request, SamplingParams

HIDDEN, FFN, HEADS, KV_HEADS, SIZE, VOCAB = 48, 80, 4, 2, 16, 97
MASK, WIDTH, TAPS, THETA, EPS = 3, 6, (0, 1), 5000.0, 1e-5
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_target_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_theta": THETA,
    "max_position_embeddings": 1024,
    "block_size": WIDTH,
    "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": MASK},
}


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    """All tensors of a checkpoint; norms are far from one, so that none can stand for another."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,),
    }  # fmt: skip
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * SIZE, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * SIZE, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
                "self_attn.q_norm": (SIZE,),
                "self_attn.k_norm": (SIZE,),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
            }.items()
        }
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_norm = len(shape) == 1
        tensors[f"{name}.weight"] = 1 + 0.3 * values if is_norm else 0.2 * values
    return tensors


def write_checkpoint(path: Path, tensors: dict[str, Tensor], config: dict = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors")
    return path


# The reference


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """`[tokens, heads, SIZE]` at absolute positions, halves paired."""
    frequencies = THETA ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    angles = positions[:, None, None] * frequencies
    one, other = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def reference_logits(tensors: dict[str, Tensor], target: Target, features: Tensor, root: int):
    """Logits `[D, V]` of the block after a context with these features."""
    w = {name.removesuffix(".weight"): value for name, value in tensors.items()}
    block = torch.tensor([root] + [MASK] * (WIDTH - 1))
    h = target.embedding[block]
    context = rms_norm(features @ w["fc"].T, w["hidden_norm"])
    at = torch.arange(len(context) + WIDTH, dtype=torch.float64)
    for i in range(2):
        layer = {
            name.removeprefix(f"layers.{i}."): value
            for name, value in w.items()
            if name.startswith(f"layers.{i}.")
        }
        u = rms_norm(h, layer["input_layernorm"])
        both = torch.cat([context, u])  # the context does not pass the layer's input norm
        q = (u @ layer["self_attn.q_proj"].T).view(WIDTH, HEADS, SIZE)
        k = (both @ layer["self_attn.k_proj"].T).view(-1, KV_HEADS, SIZE)
        v = (both @ layer["self_attn.v_proj"].T).view(-1, KV_HEADS, SIZE)
        q = rotated(rms_norm(q, layer["self_attn.q_norm"]), at[-WIDTH:])
        k = rotated(rms_norm(k, layer["self_attn.k_norm"]), at)
        attended = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            weights = (q[:, head] @ k[:, group].T / SIZE**0.5).softmax(-1)
            attended.append(weights @ v[:, group])
        h = h + torch.cat(attended, -1) @ layer["self_attn.o_proj"].T
        u = rms_norm(h, layer["post_attention_layernorm"])
        up = F.silu(u @ layer["mlp.gate_proj"].T) * (u @ layer["mlp.up_proj"].T)
        h = h + up @ layer["mlp.down_proj"].T
    return target.logits(rms_norm(h, w["norm"])[1:])


def assert_marginals(
    found: Marginals, row: int, logits: Tensor, depth: int, tolerance: float = 1e-4
) -> None:
    """The row's proposals are the reference's best, the mask token and what is deeper never.

    The reference is of float64; angles of float32 are off by 5e-5 after 800 tokens.
    """
    logits = logits[:depth].clone()
    logits[:, MASK] = -torch.inf
    expected = logits.log_softmax(-1)
    best = expected.topk(min(NUM_RANKS, logits.shape[-1]), -1).values
    assert (found.log_probs_RDK[row, depth:] == -np.inf).all()
    ids, log_probs = found.token_ids_RDK[row, :depth], found.log_probs_RDK[row, :depth]
    np.testing.assert_allclose(log_probs, best.numpy(), atol=tolerance)
    of_these = expected.gather(-1, torch.tensor(ids))
    np.testing.assert_allclose(log_probs, of_these.numpy(), atol=tolerance)
    assert all(len(set(at_depth)) == len(at_depth) for at_depth in ids.tolist())
    assert MASK not in ids[log_probs > -np.inf]
    assert (log_probs <= 0).all()


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def tensors():
    return random_tensors()


@pytest.fixture
def drafter(target, tensors, tmp_path):
    return load_drafter(write_checkpoint(tmp_path / "drafter", tensors), target)


class Rows:
    """Rows with random features, as the engine would report them, and all they were told."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self.drafter = drafter
        self.told: dict[int, Tensor] = {}
        self._generator = torch.Generator().manual_seed(1)

    def observe(self, counts: dict[int, int]) -> None:
        shape = sum(counts.values()), len(TAPS) * HIDDEN
        features = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        self.drafter.observe(list(counts), list(counts.values()), features)
        for key, part in zip(counts, features.split(list(counts.values())), strict=True):
            self.told[key] = torch.cat([self.told[key], part]) if key in self.told else part

    def forget(self, key: int) -> None:
        self.drafter.forget(key)
        del self.told[key]

    def root(self, key: int) -> int:
        return (7 * key + len(self.told[key])) % VOCAB

    def draft(self, keys: Sequence[int], depths: Sequence[int] | None = None) -> Marginals:
        rows = [
            DraftRow(key, [1] * len(self.told[key]) + [self.root(key)], depth)
            for key, depth in zip(keys, depths or [self.drafter.depth] * len(keys), strict=True)
        ]
        with torch.inference_mode():
            return self.drafter.draft(rows)

    def assert_drafts(self, keys: Sequence[int], tensors, target, depths=None) -> None:
        depths = depths or [self.drafter.depth] * len(keys)
        found = self.draft(keys, depths)
        for place, key in enumerate(keys):
            logits = reference_logits(tensors, target, self.told[key], self.root(key))
            assert_marginals(found, place, logits, depths[place])


def test_a_single_row_drafts_as_the_reference(drafter, tensors, target):
    rows = Rows(drafter)
    rows.observe({5: 9})
    rows.assert_drafts([5], tensors, target)


def test_ragged_rows_draft_as_the_reference_round_after_round(drafter, tensors, target):
    """Chunks of prompt, unequal commits, capacities outgrown, rows that leave and come."""
    rows = Rows(drafter)
    rows.observe({1: 3, 2: 250, 3: 40})
    rows.observe({2: 30, 3: 1})
    rows.assert_drafts([1, 2, 3], tensors, target)
    rows.observe({3: 4, 1: 1, 2: 6})
    rows.assert_drafts([3, 1], tensors, target)
    rows.forget(1)
    rows.observe({4: 12, 3: 2})
    rows.assert_drafts([2, 4, 3], tensors, target)
    rows.forget(3)
    rows.observe({4: 255, 2: 1})
    rows.assert_drafts([4, 2], tensors, target)


@pytest.mark.parametrize("depths", [[0, 2, 1], [5, 0, 3], [0, 0, 0]])
def test_rows_draft_as_deep_as_they_want(drafter, tensors, target, depths):
    rows = Rows(drafter)
    rows.observe({1: 4, 2: 9, 3: 2})
    rows.assert_drafts([1, 2, 3], tensors, target, depths)


def test_drafting_leaves_no_trace(drafter, tensors, target):
    """A block saw masks: nothing of it is kept."""
    rows = Rows(drafter)
    rows.observe({1: 20, 2: 5})
    for _ in range(3):
        rows.assert_drafts([2, 1], tensors, target)


def test_a_forgotten_key_is_free_again(drafter, target, tensors):
    rows = Rows(drafter)
    for length in (30, 4, 300):
        rows.observe({1: length})
        rows.assert_drafts([1], tensors, target)
        rows.forget(1)
    drafter.forget(1)
    drafter.forget(99)


def test_a_lagging_drafter_is_noticed(drafter):
    Rows(drafter).observe({1: 5})
    with pytest.raises(AssertionError, match="lags"):
        drafter.draft([DraftRow(1, [1] * 7, drafter.depth)])


# Tokens that wait


def test_what_waits_is_projected_as_if_at_once(drafter, tensors, target):
    """Token by token as in plain decoding, past what may wait, one row long after the other."""
    rows = Rows(drafter)
    rows.observe({1: 20, 2: 9})
    for step in range(3 * PLACES_PER_ROW):
        rows.observe({1: 1, 2: 1 + step % 2})
        assert max(drafter.num_pending(key) for key in (1, 2)) <= PLACES_PER_ROW
        if step % 50 == 10:
            rows.assert_drafts([2], tensors, target)
            assert drafter.num_pending(2) == 0
            assert drafter.num_pending(1) > 0, "only the rows that draft are caught up"
    rows.assert_drafts([1, 2], tensors, target)


def test_plain_steps_cost_no_projection(drafter):
    rows = Rows(drafter)
    rows.observe({1: 5})
    for _ in range(PLACES_PER_ROW - 5):
        rows.observe({1: 1})
    assert drafter.num_pending(1) == PLACES_PER_ROW
    assert drafter._slots[1].length == 0


def test_full_places_lose_their_oldest_tokens_alone(drafter, tensors, target):
    """Rows about to be full are projected with the full one, the others not."""
    rows = Rows(drafter)
    rows.observe({1: PLACES_PER_ROW, 2: PLACES_PER_ROW - 1, 3: PLACES_PER_ROW // 2})
    rows.observe({1: 1, 2: 1, 3: 1})
    waiting = PLACES_PER_ROW + 1 - OLDEST_TOKENS
    assert [drafter.num_pending(key) for key in (1, 2)] == [waiting, waiting - 1]
    assert drafter.num_pending(3) == PLACES_PER_ROW // 2 + 1
    rows.assert_drafts([3, 1, 2], tensors, target)


@pytest.mark.parametrize("num_tokens", [PLACES_PER_ROW - 10, PLACES_PER_ROW, PLACES_PER_ROW + 1])
def test_a_piece_of_prompt_beside_what_waits(drafter, tensors, target, num_tokens):
    rows = Rows(drafter)
    rows.observe({1: 30, 2: 5})
    rows.observe({1: num_tokens, 2: 1})
    assert drafter.num_pending(1) in (num_tokens, 0)
    rows.assert_drafts([1, 2], tensors, target)


def test_a_shared_prompt_is_projected_and_no_more(drafter, tensors, target):
    rows = Rows(drafter)
    rows.observe({1: 30})
    for key, num_waiting in ((2, 18), (3, 10), (4, 10)):
        num_shared = 30 - num_waiting
        drafter.reserve(key, num_shared)
        with torch.inference_mode():
            drafter.share(1, key, num_shared)
        rows.told[key] = rows.told[1][:num_shared]
        assert drafter.num_pending(1) == num_waiting
    rows.assert_drafts([2, 3, 4], tensors, target)
    rows.observe({4: 3, 1: 1})
    rows.assert_drafts([1, 4], tensors, target)


def test_catching_up_can_be_done_ahead(drafter, tensors, target):
    rows = Rows(drafter)
    rows.observe({1: 5, 2: 6})
    with torch.inference_mode():
        drafter.catch_up([2, 1])
        drafter.catch_up([2])
    assert drafter.num_pending(1) == drafter.num_pending(2) == 0
    rows.assert_drafts([1, 2], tensors, target)


def test_what_waits_is_forgotten_with_its_row(drafter, tensors, target):
    rows = Rows(drafter)
    rows.observe({1: 5})
    rows.forget(1)
    assert drafter.num_pending(1) == 0
    rows.observe({1: 4})
    rows.assert_drafts([1], tensors, target)


# Taps


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("taps", [(0,), (0, 2), (2, 0, 1)], ids=str)
def test_taps_are_the_outputs_of_their_layers_in_the_order_asked(family, taps):
    target, module = tiny_target(family), tiny_module(family)
    outputs = {}
    handles = [
        layer.register_forward_hook(lambda _, __, out, i=i: outputs.__setitem__(i, out))
        for i, layer in enumerate(module.model.layers)
    ]
    ids = torch.arange(2, 13)
    with torch.inference_mode():
        module(ids[None])
        slot = (cache := target.new_cache()).open(len(ids))
        plan = AttentionPlan(
            cache, [PassRow(slot, len(ids), None)], target.stack.config.num_q_heads
        )
        found = target.forward(ids, torch.arange(len(ids)), len(ids) - 1, plan, taps).taps_SF
    for handle in handles:
        handle.remove()
    expected = torch.cat([outputs[tap].view(len(ids), -1) for tap in taps], -1)
    # transformers' norms compute in float32 whatever the model's dtype
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class Recorder:
    """Passes everything on to a drafter and remembers what it proposed."""

    shape = None

    def __init__(self, drafter: DFlashDrafter) -> None:
        self.depth, self.taps = drafter.depth, drafter.taps
        self.caches, self.reserve, self.share = drafter.caches, drafter.reserve, drafter.share
        self.observe, self.forget = drafter.observe, drafter.forget
        self.num_pending, self.catch_up = drafter.num_pending, drafter.catch_up
        self.narrow = drafter.narrow
        self.pending_bytes_per_row = drafter.pending_bytes_per_row
        self._drafter = drafter
        self.calls: list[tuple[list[DraftRow], Marginals]] = []

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        found = self._drafter.draft(rows)
        self.calls.append(([DraftRow(r.key, list(r.token_ids), r.depth) for r in rows], found))
        return found


def test_the_engine_tells_the_drafter_all_it_should(tensors, tmp_path):
    """Every proposal of a run is the reference's, from transformers' own hidden states.

    The long prompts enter in several chunks, so a chunk whose taps were lost would show. A tiny
    vocabulary lets random drafts be accepted.
    """
    target, module = tiny_target("qwen3", vocab_size=13), tiny_module("qwen3", vocab_size=13)
    path = write_checkpoint(tmp_path / "drafter", tensors, edited(vocab_size=13))
    recorder = Recorder(load_drafter(path, target))
    engine = Engine(
        target, recorder, method="ddtree", nodes_per_row=30, max_batch=4, costs=fixed_costs(target)
    )
    wanted = requests(4, 30, vocab_size=13, ignore_eos=True)
    wanted += [
        Request(
            row_id=f"long{n}",
            prompt_ids=tuple((2 + (np.arange(300) * (n + 3) % 11)).tolist()),
            sampling=SamplingParams(max_new_tokens=20, ignore_eos=True),
        )
        for n in range(3)
    ]
    assert len(list(engine.generate(wanted))) == 7
    assert engine.totals.num_accepted > engine.totals.num_row_steps / 4, "paths are told"
    checked = 0
    for rows, found in recorder.calls[::4]:
        for place, row in enumerate(rows):
            with torch.inference_mode():
                states = module(
                    torch.tensor([row.token_ids[:-1]]), output_hidden_states=True
                ).hidden_states
            features = torch.cat([states[tap + 1][0] for tap in TAPS], -1)
            logits = reference_logits(tensors, target, features, row.token_ids[-1])
            assert_marginals(found, place, logits, row.depth, tolerance=1e-2)
            checked += 1
    assert checked >= 15


# What is refused


def edited(**changes) -> dict:
    """The configuration with changes; `dflash_config__x` reaches inside; None removes."""
    config = {**CONFIG, "dflash_config": dict(CONFIG["dflash_config"])}
    for key, value in changes.items():
        inner = config["dflash_config"] if key.startswith("dflash_config__") else config
        key = key.removeprefix("dflash_config__")
        inner[key] = value
        if value is None:
            del inner[key]
    return config


REFUSED = {
    "no taps": (edited(dflash_config__target_layer_ids=None), "target_layer_ids"),
    "no options at all": (edited(dflash_config=None), "target_layer_ids"),
    "a negative tap": (edited(dflash_config__target_layer_ids=[0, -1]), "target_layer_ids.* -1"),
    "a tap past the end": (edited(dflash_config__target_layer_ids=[0, 3]), "target_layer_ids.* 3"),
    "a tap that is no number": (
        edited(dflash_config__target_layer_ids=[0, "1"]),
        "target_layer_ids",
    ),
    "too many taps for fc": (edited(dflash_config__target_layer_ids=[0, 1, 2]), "fc.weight"),
    "no mask id": (edited(dflash_config__mask_token_id=None), "mask_token_id"),
    "a mask id out of range": (edited(dflash_config__mask_token_id=VOCAB), "mask_token_id.*97"),
    "a negative mask id": (edited(dflash_config__mask_token_id=-1), "mask_token_id"),
    "another architecture": (edited(architectures=["OtherModel"]), "OtherModel"),
    "no architecture": (edited(architectures=None), "architectures"),
    "a domino": (edited(dflash_config__projector_type="domino"), "projector_type"),
    "windows that are switched off": (
        edited(
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=64,
            use_sliding_window=False,
        ),
        "use_sliding_window",
    ),
    "too few layer types": (edited(layer_types=["full_attention"]), "layer_types"),
    "unknown layer types": (edited(layer_types=["full_attention", "mamba"]), "mamba"),
    "sinks": (edited(attention_sink_bias=True), "attention_sink_bias"),
    "a head without a map": (edited(draft_vocab_size=40), "draft_vocab_size.*d2t"),
    "half a rotation": (edited(partial_rotary_factor=0.25), "partial_rotary_factor"),
    "another rope": (edited(rope_scaling={"rope_type": "longrope"}), "longrope"),
    "no theta": (edited(rope_theta=None), "rope_theta"),
    "no epsilon": (edited(rms_norm_eps=None), "rms_norm_eps"),
    "an unknown option": (edited(dflash_config__conv_kernel_size=2), "conv_kernel_size"),
    "a block of one": (edited(block_size=1), "block_size"),
    "a nested block of one": (edited(dflash_config__block_size=1), "block_size"),
    "another hidden size": (edited(hidden_size=64), "hidden_size"),
    "for a deeper target": (edited(num_target_layers=36), "num_target_layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_does_not_fit_is_refused_by_name(name, target, tensors, tmp_path):
    config, key = REFUSED[name]
    path = write_checkpoint(tmp_path / "drafter", tensors, config)
    with pytest.raises(ModelError, match=key):
        load_drafter(path, target)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_named(name, target, tensors, tmp_path):
    rest = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(ModelError, match=f"missing.*{name}"):
        load_drafter(write_checkpoint(tmp_path / "drafter", rest), target)


@pytest.mark.parametrize("name", ["layers.2.mlp.gate_proj.weight", "markov_head.markov_w1"])
def test_an_extra_tensor_is_named(name, target, tensors, tmp_path):
    more = {**tensors, name: torch.zeros(3)}
    with pytest.raises(ModelError, match=f"unclaimed.*{name}"):
        load_drafter(write_checkpoint(tmp_path / "drafter", more), target)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "config.json"),
        ("model.safetensors", None, "model.safetensors"),
        ("model.safetensors", "nonsense", "model.safetensors"),
    ],
    ids=["no config", "half a config", "a list", "no tensors", "broken tensors"],
)
def test_unreadable_files_are_named(name, content, match, target, tensors, tmp_path):
    path = write_checkpoint(tmp_path / "drafter", tensors)
    (path / name).unlink()
    if content is not None:
        (path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=match):
        load_drafter(path, target)


# What is read


@pytest.mark.parametrize(
    ("config", "depth"),
    [
        (CONFIG, 5),
        (edited(dflash_config__block_size=4), 3),
        (edited(block_size=None, dflash_config__block_size=9), 8),
        (edited(block_size=None), 15),
    ],
    ids=["top level", "nested wins", "nested only", "default of sixteen"],
)
def test_the_block_size_is_read_nested_first(config, depth, target, tensors, tmp_path):
    path = write_checkpoint(tmp_path / "drafter", tensors, config)
    assert load_drafter(path, target).depth == depth


def test_an_old_mask_id_at_the_top_level_is_read(target, tensors, tmp_path):
    config = edited(dflash_config__mask_token_id=None, mask_token_id=11)
    drafter = load_drafter(write_checkpoint(tmp_path / "drafter", tensors, config), target)
    Rows(drafter).observe({1: 4})
    found = drafter.draft([DraftRow(1, [1] * 5, drafter.depth)])
    assert 11 not in found.token_ids_RDK[found.log_probs_RDK > -np.inf]


def test_harmless_options_are_accepted(target, tensors, tmp_path):
    config = edited(is_causal=False, use_cache=True, dflash_config__causal_head=False)
    load_drafter(write_checkpoint(tmp_path / "drafter", tensors, config), target)


def test_a_narrow_drafter_proposes_the_first_tokens_only(drafter, tensors, target):
    rows = Rows(drafter)
    rows.observe({1: 6, 2: 3})
    whole = rows.draft([1, 2])
    drafter.narrow(20)
    narrow = rows.draft([1, 2])
    drafter.narrow(VOCAB)
    assert narrow.token_ids_RDK.max() < 20
    for place in range(2):
        for depth in range(drafter.depth):
            first = [int(t) for t in whole.token_ids_RDK[place, depth] if t < 20]
            assert narrow.token_ids_RDK[place, depth, : len(first)].tolist() == first
    again = rows.draft([1, 2])
    np.testing.assert_array_equal(again.log_probs_RDK, whole.log_probs_RDK)
