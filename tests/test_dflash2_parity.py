"""DFlash 2 and DSpark's heads beside the public implementations, with the same random weights.

PyPI `dflash` reads the same files; of `speculators`, which has no decoding, the heads are compared.
"""

import json
import warnings
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_target
from torch import Tensor

from bastion_batch.core.rounds import Frontier
from bastion_batch.engine.candidates import Search
from bastion_batch.engine.drafters import DraftRow
from bastion_batch.engine.drafters.description import MarkovHead
from bastion_batch.engine.drafters.head import BestIds
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.drafters.markov import MarkovBias
from bastion_batch.engine.drafters.selector import CandidateSelector
from bastion_batch.engine.limits import Allowed

VOCAB, MASK = 97, 3
BASE: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_target_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "target_layer_ids": [0, 2], "mask_token_id": MASK, "block_size": 6, "conv_kernel_size": 2,
    "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 8,
}  # fmt: skip


def config_of(options: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return BASE | top | {"dflash_config": OPTIONS | (options or {})}


SHAPES = {
    "full attention": config_of(),
    "windows, not causal": config_of(
        is_causal=False,
        layer_types=["sliding_attention"] * 2,
        sliding_window=9,
        use_sliding_window=True,
    ),
    "mixed windows, one layer more than taps, yarn": config_of(
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=7,
        use_sliding_window=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "softcap, multiplier, scale, one key head": config_of(
        {"output_multiplier": 0.3, "final_logit_softcapping": 4.0, "input_embedding_scale": 2.5},
        num_key_value_heads=1,
    ),
    "wide kernel, three taps, short block": config_of(
        {"conv_kernel_size": 3, "conv_group_size": 8, "block_size": 4,
         "target_layer_ids": [2, 0, 1]},
        num_hidden_layers=1,
    ),
}  # fmt: skip
CONTEXT, ROOT = 23, 41


def quietly(name: str) -> Any:
    """A module that warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except ImportError:
            pytest.skip(f"{name.partition('.')[0]} is not installed")


def random_weights(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """By name; norms are far from one, codebooks as loud as logits."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        is_norm = "norm" in name and len(shape) == 1
        tensors[name] = 1 + 0.3 * values if is_norm else 0.2 * values
        if "codebook" in name:
            tensors[name] = values
    return tensors


class Pair:
    """The two implementations, reading the same file."""

    def __init__(self, config: dict[str, Any], path) -> None:
        public = quietly("dflash.model").DFlash2DraftModel
        shapes = {k: v.shape for k, v in public(as_config(config)).state_dict().items()}
        names = {name: name.removesuffix(".weight") for name in shapes if "codebook" in name}
        weights = random_weights({names.get(name, name): s for name, s in shapes.items()})
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        self.public = public.from_pretrained(path, dtype=torch.float32).eval()
        self.target = tiny_target("qwen3", dtype=torch.float32)
        self.ours = load_drafter(path, self.target)
        generator = torch.Generator().manual_seed(1)
        width = 48 * len(config["dflash_config"]["target_layer_ids"])
        self.features = torch.randn(CONTEXT, width, generator=generator)
        self.rows = [DraftRow(0, [1] * CONTEXT + [ROOT], self.ours.depth)]
        self._scale = config["dflash_config"].get("input_embedding_scale", 1.0)
        with torch.inference_mode():
            self.ours.observe([0], [CONTEXT], self.features)

    def public_hidden(self) -> Tensor:
        """`[W, E]` of the whole block."""
        width = self.public.block_size
        block = torch.tensor([ROOT] + [MASK] * (width - 1))
        with torch.inference_mode():
            return self.public(
                position_ids=torch.arange(CONTEXT + width)[None],
                noise_embedding=self.target.embedding[block][None] * self._scale,
                target_hidden=self.features[None],
            )[0]

    def public_proposal(self, temperature: float):
        """Path, candidates and q `[D, K]` along it."""
        with torch.inference_mode():
            path, candidates, q = self.public.propose(
                self.public_hidden()[None, 1:],
                torch.tensor([ROOT]),
                self.target.logits,
                temperature,
            )
        return path[0].tolist(), candidates[0].tolist(), None if q is None else q[0]


def as_config(config: dict[str, Any]):
    from transformers import Qwen3Config

    return Qwen3Config.from_dict({k: v for k, v in config.items() if k != "architectures"})


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    return Pair(SHAPES[request.param], tmp_path_factory.mktemp("dflash2") / "drafter")


def test_hidden_states_and_logits_are_the_same(pair):
    with torch.inference_mode():
        found = pair.ours.blocks(pair.rows).hidden_SE
        logits = pair.ours.block_logits(pair.rows)[0]
        expected = pair.public_hidden()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
        expected = pair.public.compute_logits(expected, pair.target.logits)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_candidates_and_their_scores_are_the_same_along_sampled_paths(pair):
    """q of a sampled path, slot after slot, is what the same path has here."""
    with torch.inference_mode():
        marginals = pair.ours.draft(pair.rows)
    ids_DK = marginals.token_ids_RDK[0]
    for seed in range(3):
        torch.manual_seed(seed)
        path, candidates, q = pair.public_proposal(1.0)
        assert MASK not in np.array(candidates), "it is never a candidate here"
        column = 0
        for depth, (token, expected, ids) in enumerate(
            zip(path, q.tolist(), candidates, strict=True), start=1
        ):
            ints = [np.array([value], np.int32) for value in (0, column, 0)]
            found = pair.ours.log_probs_after(Frontier(depth, *ints, np.ones(1, np.bool_)))[0]
            by_token = dict(zip(ids_DK[depth - 1].tolist(), np.exp(found).tolist(), strict=True))
            expected = dict(zip(ids, expected, strict=True))
            assert by_token == pytest.approx(expected, abs=2e-5)
            column = ids_DK[depth - 1].tolist().index(token)


def test_the_greedy_chain_is_the_same(pair):
    with torch.inference_mode():
        marginals = pair.ours.draft(pair.rows)
    possible = Allowed(marginals, np.zeros(marginals.token_ids_RDK.shape, np.bool_))
    depth = pair.ours.depth
    found = Search(None, depth, 1).asking(pair.ours, possible, np.array([depth]), None)
    path, _, _ = pair.public_proposal(0.0)
    assert marginals.token_ids_RDK[0, found.depths_N - 1, found.columns_N].tolist() == path


# The heads of `speculators`


def weights_of(module: torch.nn.Module, prefix: str) -> dict[str, Tensor]:
    weights = random_weights({k: v.shape for k, v in module.state_dict().items()})
    module.load_state_dict(weights)
    return {f"{prefix}{name}": value for name, value in weights.items()}


@pytest.mark.slow  # importing it takes ten seconds
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_biases_are_those_of_speculators(kind):
    """Of a reduced vocabulary, along a block whose first slot is the anchor's."""
    module = quietly("speculators.models.dspark.model_definitions").MarkovHead(
        verifier_vocab_size=VOCAB, draft_vocab_size=31, markov_rank=6, hidden_size=10,
        head_type=kind,
    )  # fmt: skip
    head = MarkovBias(MarkovHead(kind=kind, rank=6), weights_of(module, "markov_head."))
    hidden = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    previous = torch.tensor([8, 8, 90, 4, 17])
    with torch.inference_mode():
        expected = module.block_bias(prev_token_ids=previous[None], hidden_states=hidden[None])[0]
        if kind == "rnn":
            states, outputs = head.initial_states(1), []
            for slot in range(5):
                step = head.step(states, hidden[slot : slot + 1], previous[slot : slot + 1])
                states = step.states_NN
                outputs.append(step.output_NN)
            output_SPN = torch.stack(outputs)
        else:
            output_SPN = head.outputs(hidden, previous[:, None])
        # Of all 31 tokens, equally probable without the head, the scores are the biases.
        ids = torch.arange(31).expand(5, -1)
        best = BestIds(torch.full((5, 31), 1 / 31).log(), ids, ids)
        found = head.log_probs(output_SPN, best)[:, 0]
    torch.testing.assert_close(found, expected.log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_selector_scores_are_those_of_speculators():
    module = quietly("speculators.models.dflash2.model_definitions").CandidateSelector(
        vocab_size=VOCAB, hidden_size=10, rank=6, top_k=8
    )
    selector = CandidateSelector(weights_of(module, "candidate_selector."))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 10, generator=generator)
    candidates = torch.randint(VOCAB, (5, 8), generator=generator)
    parents = torch.randint(VOCAB, (5, 3), generator=generator)
    with torch.inference_mode():
        found = selector.transitions(hidden, candidates, parents)
        expected = torch.stack(
            [module.transition_scores(hidden, parents[:, p], candidates) for p in range(3)], 1
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
