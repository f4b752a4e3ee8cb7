"""Tiny random models for the engine's tests: built in place, no network, float64 by default."""

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.latency import LatencyModel
from bastion_batch.engine import Engine
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.loading import drafter_of_tensors
from bastion_batch.engine.latency import StepCosts
from bastion_batch.engine.target import Target
from bastion_batch.records import Request, SamplingParams

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.4,
}


@cache
def tiny_module(family: str, vocab_size: int = 97, dtype: torch.dtype = torch.float64):
    """A random Llama or Qwen3 that never changes."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    torch.manual_seed(0)
    config = config_class(vocab_size=vocab_size, tie_word_embeddings=family == "llama", **SIZES)
    return model_class(config).to(dtype).eval()


@cache
def tiny_target(family: str, vocab_size: int = 97, dtype: torch.dtype = torch.float64) -> Target:
    return Target.of_module(tiny_module(family, vocab_size, dtype))


def tiny_drafter(target: Target, block_size: int = 6, seed: int = 0) -> DFlashDrafter:
    """A DFlash drafter with random weights for a tiny target."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, heads, kv_heads, head = 48, 96, 4, 2, 16
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "vocab_size": 97, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "block_size": block_size,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 0},
    }  # fmt: skip
    shapes = {
        "self_attn.q_proj": (heads * head, hidden), "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden), "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    norms = {
        "input_layernorm": hidden, "post_attention_layernorm": hidden,
        "self_attn.q_norm": head, "self_attn.k_norm": head,
    }  # fmt: skip
    tensors = {"fc.weight": 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)}
    tensors |= {"hidden_norm.weight": torch.ones(hidden), "norm.weight": torch.ones(hidden)}
    for layer in range(2):
        for name, shape in shapes.items():
            weight = 0.2 * torch.randn(shape, generator=generator)
            tensors[f"layers.{layer}.{name}.weight"] = weight
        for name, size in norms.items():
            tensors[f"layers.{layer}.{name}.weight"] = torch.ones(size)
    return drafter_of_tensors(config, tensors, target)


class FixedCosts(StepCosts):
    """Nodes are cheap, plain steps are not, and nothing that is measured changes that."""

    def plain_step_seconds(self, num_rows: int, context_tokens: int) -> float:
        return 1e9

    def observe_verify(self, load, seconds) -> None:
        pass

    def observe_draft(self, load, seconds) -> None:
        pass

    def observe_other(self, seconds: float) -> None:
        pass


def fixed_costs(target: Target) -> StepCosts:
    """Costs with which trees grow large, the same ones in every run."""
    return FixedCosts(LatencyModel(target.shape, DeviceSpeed(1e15, 1e6)), None)


def tiny_engine(family: str = "llama", drafter=None, vocab_size: int = 97, **options) -> Engine:
    target = tiny_target(family, vocab_size)
    if drafter == "dflash":
        drafter = tiny_drafter(target)
    return Engine(target, drafter, costs=fixed_costs(target), **{"max_batch": 16, **options})


def requests(
    count: int, max_new_tokens: int = 24, vocab_size: int = 97, **sampling
) -> list[Request]:
    """Prompts of unequal lengths with distinct noise keys."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for number in range(count):
        length = int(torch.randint(1, 30, (), generator=generator))
        ids = torch.randint(2, vocab_size, (length,), generator=generator)
        params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
        request = Request(
            row_id=f"r{number:03d}",
            prompt_ids=tuple(ids.tolist()),
            sampling=params,
            noise_key=1000 + number,
        )
        result.append(request)
    return result


def outputs_of(engine: Engine, wanted: list[Request]) -> list[tuple[int, ...]]:
    """Output ids in the order of the requests; checks the engine's books on the way."""
    found = {c.row_id: c for c in engine.generate(wanted)}
    engine.check_integrity()
    assert not engine.has_work
    for completion in found.values():
        recorded = sum(record.num_committed for record in completion.records)
        assert recorded + 0 == completion.num_output_tokens
    return [found[request.row_id].output_ids for request in wanted]
