"""A tiny Llama as a GGUF file, and as the checkpoint directory that it becomes."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from bastion_batch.engine.builtin import convert

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, LAYERS = 32, 48, 4, 2, 8, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "t h", "th e"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tiny_weights() -> dict[str, np.ndarray]:
    """Weights under the names, and in the layout, that transformers uses."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    weights = {
        "model.embed_tokens.weight": rng.standard_normal((len(TOKENS), HIDDEN)),
        "model.norm.weight": rng.standard_normal(HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = rng.standard_normal(shape)
    return {name: values.astype(np.float32) for name, values in weights.items()}


def write_tiny_gguf(path: Path) -> Path:
    """Write the tiny model as llama.cpp's converter would."""
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in tiny_weights().items():
        writer.add_tensor(*_as_gguf(name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_checkpoint(directory: Path) -> Path:
    """Write the tiny model as a checkpoint directory."""
    directory.mkdir(parents=True)
    convert(write_tiny_gguf(directory.with_suffix(".gguf")), directory)
    return directory


def _as_gguf(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    base = name.removesuffix(".weight")
    prefix = ""
    if base.startswith("model.layers."):
        _, _, layer, base = base.split(".", 3)
        prefix = f"blk.{layer}."
    kind = names[base]
    if kind in heads:  # the halves that transformers rotates become neighbouring pairs
        halves = values.reshape(heads[kind], 2, HEAD // 2, HIDDEN)
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return f"{prefix}{kind}.weight", values
