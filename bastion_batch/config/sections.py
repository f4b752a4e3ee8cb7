"""Sections of a job: input, output, models, decoding, limits."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from bastion_batch.config.fields import Auto, Dtype, Section, Word, identity, operational
from bastion_batch.records import Method, SamplingParams

MIN_TEMPERATURE = 1e-3
"""Below it logits divided by the temperature leave float32 no room for the noise."""


class InputConfig(Section):
    """Where the prompts are and how a row becomes one."""

    path: str | tuple[str, ...] = operational()
    """File, glob, directory, URL (s3://, gs://, any that fsspec knows), or a list of them;
    .jsonl and .parquet."""
    prompt: str | None = identity(default=None)
    """Column that holds the prompt's text."""
    messages: str | None = identity(default=None)
    """Column that holds a chat: a list of {role, content}."""
    system: str | None = identity(default=None)
    """System message put before every prompt."""
    chat_template: bool | Auto = identity(default="auto")
    """Wrap `prompt` as one user message; ``auto``: when the target's tokenizer has a template."""
    storage_options: dict[str, Any] = operational(default={}, repr=False)
    """What the file system of a URL needs (fsspec): credentials, an endpoint. Never shown."""

    @model_validator(mode="after")
    def _one_source(self) -> "InputConfig":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        if self.system is not None and self.chat_template is False:
            raise ValueError("`system` needs the chat template, but `chat_template` is false")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The path or paths as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class OutputConfig(Section):
    """Where the answers go and what is written beside them."""

    path: str = operational()
    """Directory of the output, which is created, or URL: s3://, gs://, any that fsspec knows."""
    storage_options: dict[str, Any] = operational(default={}, repr=False)
    """What the file system of a URL needs (fsspec): credentials, an endpoint. Never shown."""
    steps: Annotated[str, Word] = operational(default="auto")
    """Step records: ``all``, ``sample:FRACTION`` of the rows, ``off``;
    ``auto`` is all, and a sample above 100,000 rows."""
    output_token_ids: bool = identity(default=False)
    """Add the column `output_token_ids`."""
    on_collision: Literal["error", "prefix", "drop_input"] = identity(default="error")
    """What to do with an input column that has the name of one of ours."""
    unit_rows: PositiveInt | Auto = identity(default="auto")
    """Rows committed together as one file."""

    @field_validator("steps")
    @classmethod
    def _known_steps(cls, value: str) -> str:
        kind, _, fraction = value.partition(":")
        if value in ("auto", "all", "off"):
            return value
        if kind == "sample" and re.fullmatch(r"0?\.\d+|1(\.0*)?", fraction) and float(fraction):
            return value
        raise ValueError(f"{value!r} is none of auto, all, off, sample:FRACTION (0 to 1)")


class ModelConfig(Section):
    """The target and its drafter."""

    target: str = operational()
    """Built-in name, local directory or hub id; identity is the digest of what it holds."""
    revision: str | None = operational(default=None)
    """Revision of a hub target."""
    drafter: str | None = operational(default="default")
    """``default`` (the one built in for the target), directory, hub id, or null: no drafting."""
    probe: Annotated[Literal["auto", "off"], Word] = operational(default="auto")
    """``auto``: hold a drafter against the target's own text when the two first meet on a machine,
    and refuse it if its files describe it wrongly; ``off``: take it as it says it is."""
    dtype: Dtype = identity(default="auto")
    """One per job. ``auto``: bfloat16 on CUDA and on CPUs with bfloat16 units, else float32."""
    allow_mixed_dtype: bool = identity(default=False)
    """Let workers differ in dtype; each row then says its own, in the column `dtype`."""
    trust_remote_code: Literal[False] = operational(default=False)
    """Code from a checkpoint is never run."""


class DecodingConfig(Section):
    """How completions are drawn. The method changes the speed and never the text."""

    method: Method = operational(default="bastion")
    """``ar`` plain, ``dflash`` chain, ``ddtree`` fixed tree, ``bastion`` adaptive tree."""
    nodes_per_row: PositiveInt = operational(default=16)
    """Drafted nodes per row of ``ddtree``."""
    max_nodes: PositiveInt = operational(default=512)
    """Most nodes of one pass, over all rows, for ``bastion``."""
    temperature: NonNegativeFloat = identity(default=0.0)
    """0 is greedy."""
    top_k: PositiveInt | None = identity(default=None)
    """Sample among the k most probable tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = identity(default=1.0)
    """Sample among the fewest tokens that hold this mass."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = identity(default=0.0)
    """Sample among tokens at least this fraction as probable as the best."""
    repetition_penalty: Annotated[float, Field(gt=0)] = identity(default=1.0)
    """Above 1 discourages tokens of prompt and output."""
    presence_penalty: float = identity(default=0.0)
    """Subtracted from the logit of a token that the output holds."""
    frequency_penalty: float = identity(default=0.0)
    """Subtracted from a token's logit for each occurrence in the output."""
    max_new_tokens: PositiveInt = identity(default=256)
    """Most tokens of a completion."""
    min_new_tokens: NonNegativeInt = identity(default=0)
    """No stop token before this many tokens."""
    logit_bias: tuple[tuple[NonNegativeInt, float], ...] = identity(default=())
    """Mapping of token ids to what is added to their logits."""
    banned_ids: tuple[NonNegativeInt, ...] = identity(default=())
    """Tokens that are never chosen, whatever their bias."""
    stop_token_ids: tuple[NonNegativeInt, ...] = identity(default=())
    """Tokens that end a completion, besides the target's own; also with ``ignore_eos``."""
    ignore_eos: bool = identity(default=False)
    """Go on after an end-of-sequence token."""
    seed: int = identity(default=0)
    """Seed of the job's sampling noise."""
    samples_per_row: Annotated[int, Field(ge=1, le=2**31 - 1)] = identity(default=1)
    """Completions of each row."""
    stop: tuple[str, ...] = identity(default=())
    """Strings that end a completion."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every completion at once")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        return tuple(value.items()) if isinstance(value, Mapping) else value

    @field_validator("logit_bias")
    @classmethod
    def _one_bias_each(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        ids = [token for token, _ in value]
        twice = sorted({token for token in ids if ids.count(token) > 1})
        if twice:
            raise ValueError(f"token {twice[0]} has more than one bias")
        return tuple(sorted(value))

    @field_validator("banned_ids", "stop_token_ids")
    @classmethod
    def _in_order(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("temperature")
    @classmethod
    def _greedy_or_warm(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"a temperature above 0 is at least {MIN_TEMPERATURE}; 0 is greedy")
        return value

    @model_validator(mode="after")
    def _min_below_max(self) -> "DecodingConfig":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        return self

    @property
    def sampling(self) -> SamplingParams:
        """The part that the engine needs for each request."""
        names = SamplingParams.__dataclass_fields__
        return SamplingParams(**{name: getattr(self, name) for name in names})


class LimitsConfig(Section):
    """When a finished job counts as failed, and a worker as stuck."""

    max_failed: NonNegativeInt | str = operational(default="1%")
    """Failed rows (samples counted) tolerated, a number or a percentage like ``1%``."""
    no_progress_seconds: Annotated[float, Field(gt=0)] = operational(default=300.0)
    """A worker that has rows and makes no step for so long is ended and started again, and so is
    one in which a row gets no token."""
    start_seconds: Annotated[float, Field(gt=0)] = operational(default=1800.0)
    """A worker that has not loaded its models by then is ended and started again."""

    @field_validator("max_failed")
    @classmethod
    def _count_or_percent(cls, value: int | str) -> int | str:
        if isinstance(value, str) and not re.fullmatch(r"\d+(\.\d+)?%", value):
            raise ValueError(f"{value!r} is neither a number nor a percentage like '1%'")
        if isinstance(value, str) and float(value[:-1]) > 100:
            raise ValueError(f"{value!r} is over 100%")
        return value

    def failed_rows_allowed(self, num_outputs: int) -> int:
        """The limit as a count, of so many output rows."""
        if isinstance(self.max_failed, int):
            return self.max_failed
        return int(num_outputs * float(self.max_failed[:-1]) / 100)
