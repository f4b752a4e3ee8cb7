"""The target: the model whose distribution we sample."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_batch.core.roofline import ModelShape
from bastion_batch.engine.attention import AttentionPlan
from bastion_batch.engine.cache import KVCache
from bastion_batch.engine.checkpoints import SUPPORTED_FAMILIES
from bastion_batch.engine.huge_pages import move_to_huge_pages
from bastion_batch.engine.linear import Linear
from bastion_batch.engine.transformer import (
    DecoderStack,
    Layer,
    Rotary,
    StackConfig,
    StackOutput,
    layer_tensors,
)
from bastion_batch.errors import ModelError


class TokenIds(NamedTuple):
    """Token ids that matter beyond the text."""

    end: frozenset[int]
    """They end an output."""
    vocab_size: int
    """Ids from here on are never proposed or sampled."""


class Target:
    """Embedding, decoder stack and head of a causal language model.

    Build one with `load` or `of_module`.
    """

    def __init__(
        self,
        stack: DecoderStack,
        embedding: Tensor,
        head: Tensor,
        ids: TokenIds,
        device: torch.device,
    ) -> None:
        self.stack = stack
        self.embedding = embedding
        self.head = Linear(head)
        self.head_weight = head
        self._first_head: tuple[int, Linear] | None = None
        self.ids = ids
        self.device = device

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: torch.device) -> "Target":
        """Load a checkpoint directory with transformers.

        Raises:
            ModelError: it cannot be loaded, or its layers are not ones we verify as a tree.
        """
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            require_supported(AutoConfig.from_pretrained(path))
            module, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        except ModelError:
            raise
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"target {path} cannot be loaded: {error}") from error
        faults = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
        if faults:
            raise ModelError(f"target {path}: its tensors are not the model's: {faults}")
        target = cls.of_module(module, device)
        del module, report
        move_to_huge_pages(target)
        return target

    @classmethod
    def of_module(cls, module: Any, device: torch.device | None = None) -> "Target":  # noqa: ANN401
        """Take over the weights of a transformers causal language model of a supported family."""
        require_supported(module.config)
        device = device or module.device
        stack_config = StackConfig.of(module.config)
        tensors = {name: value.to(device) for name, value in module.state_dict().items()}
        embedding = tensors["model.embed_tokens.weight"]
        tied = module.config.tie_word_embeddings
        head = embedding if tied else tensors["lm_head.weight"]
        layers = [
            Layer.of(layer_tensors(tensors, f"model.layers.{number}."), stack_config)
            for number in range(stack_config.num_layers)
        ]
        rotary = Rotary(module.config, embedding.dtype, device)
        stack = DecoderStack(stack_config, layers, tensors["model.norm.weight"], rotary)
        return cls(stack, embedding, head, _token_ids(module), device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype

    @property
    def shape(self) -> ModelShape:
        """What a pass costs."""
        return self.stack.config.shape(self.head.out_features, self.dtype)

    def new_cache(self) -> KVCache:
        """An empty cache for this target."""
        config = self.stack.config
        return KVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, self.device
        )

    def forward(
        self,
        token_ids_S: Tensor,
        positions_S: Tensor,
        max_position: int,
        plan: AttentionPlan,
        taps: tuple[int, ...],
    ) -> StackOutput:
        """One pass over packed tokens."""
        hidden = F.embedding(token_ids_S, self.embedding)
        return self.stack.forward(hidden, positions_S, max_position, plan, taps)

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Logits `[S, V]` of the real vocabulary."""
        return self.head(hidden_SE)[:, : self.ids.vocab_size]

    def first_logits(self, hidden_SE: Tensor, num_ids: int) -> Tensor:
        """Logits `[S, num_ids]` of the first token ids: less of the head is read.

        The part of the head is kept until another one is asked for.
        """
        if num_ids >= self.ids.vocab_size:
            return self.logits(hidden_SE)
        if self._first_head is None or self._first_head[0] != num_ids:
            self._first_head = (num_ids, Linear(self.head_weight[:num_ids]))
            move_to_huge_pages(self._first_head)
        return self._first_head[1](hidden_SE)


def require_supported(config: Any) -> None:  # noqa: ANN401 - any transformers config
    """Refuse a model that `DecoderStack` does not compute.

    Raises:
        ModelError: naming the family or the kind of layer.
    """
    family = getattr(config, "model_type", None)
    if family not in SUPPORTED_FAMILIES:
        supported = ", ".join(SUPPORTED_FAMILIES)
        raise ModelError(
            f"target of model_type {family!r} cannot be verified as a tree here; "
            f"supported families: {supported}"
        )
    StackConfig.of(config)


def _token_ids(module: Any) -> TokenIds:  # noqa: ANN401
    end = getattr(module.generation_config, "eos_token_id", None)
    if end is None:
        end = module.config.eos_token_id
    ends = [end] if isinstance(end, int) else (end or [])
    vocab_size = module.config.vocab_size
    return TokenIds(frozenset(token for token in ends if token < vocab_size), vocab_size)
