"""Which targets are decoded, and that every variant of them is decoded as transformers does."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import SIZES, fixed_costs, outputs_of, requests
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bastion_batch.engine import Engine
from bastion_batch.engine.drafters.fakes import RandomDrafter
from bastion_batch.engine.target import Target
from bastion_batch.errors import ModelError
from bastion_batch.records import Request

VOCAB = 97
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def module_of(config_class, model_class, **changes):
    """A random model in float64 whose biases and norms are random too."""
    torch.manual_seed(1)
    config = config_class(vocab_size=VOCAB, **{**SIZES, **changes})
    module = model_class(config).to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                centre = 1.0 if "norm" in name else 0.0
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
    return module


def llama(**changes):
    return module_of(LlamaConfig, LlamaForCausalLM, **changes)


VARIANTS = {
    "qwen2, biased projections": lambda: module_of(Qwen2Config, Qwen2ForCausalLM),
    "qwen3, biased projections": lambda: module_of(
        Qwen3Config, Qwen3ForCausalLM, attention_bias=True
    ),
    "llama, all biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, every head its own keys": lambda: llama(num_key_value_heads=6),
    "llama, heads wider than hidden": lambda: llama(head_dim=16),
    "llama, llama3 rotation": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama, yarn": lambda: llama(rope_parameters=YARN),
    "llama, linear rotation": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama, two ends": lambda: llama(eos_token_id=[1, 40]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_decoded_as_transformers_does(name):
    """Prompts of up to 180 tokens, past every rotation's original length; trees of random guesses."""
    module = VARIANTS[name]()
    wanted = requests(4, 16)
    wanted.append(Request(row_id="long", prompt_ids=tuple(range(2, 92)) * 2))
    expected = []
    for request in wanted:
        ids = torch.tensor([request.prompt_ids])
        with torch.no_grad():
            out = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=min(16, request.sampling.max_new_tokens),
                pad_token_id=0,
            )
        expected.append(tuple(out[0, ids.shape[1] :].tolist()))
    target = Target.of_module(module)
    drafter = RandomDrafter(VOCAB, 3, 12)
    engine = Engine(
        target, drafter, method="ddtree", nodes_per_row=20, max_batch=5, costs=fixed_costs(target)
    )
    found = outputs_of(engine, wanted)
    assert [out[: len(e)] for out, e in zip(found, expected, strict=True)] == expected
    assert len(set(expected)) > 1


REFUSED = {
    "gemma2": (
        lambda: module_of(Gemma2Config, Gemma2ForCausalLM),
        "'gemma2'.*llama, qwen2, qwen3",
    ),
    "mistral": (
        lambda: module_of(MistralConfig, MistralForCausalLM, sliding_window=16),
        "'mistral'",
    ),
    "sliding windows": (
        lambda: module_of(
            Qwen2Config,
            Qwen2ForCausalLM,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
        ),
        "sliding_attention",
    ),
    "another activation": (lambda: llama(hidden_act="gelu"), "gelu"),
    "dynamic rotation": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "dynamic",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        Target.of_module(make())


def test_a_checkpoint_is_loaded_and_refused_by_its_files(tmp_path):
    module = llama()
    module.save_pretrained(tmp_path / "good")
    target = Target.load(tmp_path / "good", torch.float64, torch.device("cpu"))
    of_module = Target.of_module(module)
    wanted = requests(3, 8)
    outputs = [outputs_of(Engine(t, costs=fixed_costs(t)), wanted) for t in (target, of_module)]
    assert outputs[0] == outputs[1]
    assert target.ids.end == frozenset({1})
    with pytest.raises(ModelError, match="nothing_here"):
        Target.load(tmp_path / "nothing_here", torch.float64, torch.device("cpu"))
    module_of(Gemma2Config, Gemma2ForCausalLM).save_pretrained(tmp_path / "gemma")
    with pytest.raises(ModelError, match="gemma2"):
        Target.load(tmp_path / "gemma", torch.float64, torch.device("cpu"))


def test_no_checkpoint_at_all_is_named(tmp_path):
    with pytest.raises(ModelError, match=tmp_path.name):
        Target.load(tmp_path, torch.float32, torch.device("cpu"))


def without_a_tensor(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def with_a_wrong_shape(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)


@pytest.mark.parametrize("damage", [without_a_tensor, with_a_wrong_shape, None])
def test_damaged_weights_are_refused(damage, tmp_path):
    """A tensor that is not there would otherwise be made up at random."""
    llama().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage is None:
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        tensors = load_file(weights)
        damage(tensors)
        save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=tmp_path.name):
        Target.load(tmp_path, torch.float32, torch.device("cpu"))


def test_pickled_weights_are_never_loaded(tmp_path):
    module = llama()
    module.config.save_pretrained(tmp_path)
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        Target.load(tmp_path, torch.float32, torch.device("cpu"))
