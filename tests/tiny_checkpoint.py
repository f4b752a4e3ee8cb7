"""A checkpoint directory with a tiny random Llama and a byte tokenizer, for whole jobs."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<eos>"


def save_tiny_checkpoint(directory, max_context=256):
    """Write what a target directory holds; the weights are the same every time."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {EOS: 0} | {symbol: i + 1 for i, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_context,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory, safe_serialization=True)
    return directory
