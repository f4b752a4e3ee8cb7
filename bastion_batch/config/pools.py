"""The section `workers`: processes that decode, in pools of those that are alike."""

import re
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from bastion_batch.config.fields import Auto, Device, Dtype, Section, operational

# What Ray takes for labels: https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
_LABEL_NAME = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = rf"(?:{_LABEL_NAME}(?:\.{_LABEL_NAME})*/)?{_LABEL_NAME}"
_LABEL_EXPRESSION = rf"!?(?:in\({_LABEL_NAME}(?:, ?{_LABEL_NAME})*\)|{_LABEL_NAME})"
_LABEL_RULE = (
    "names are of up to 63 letters, digits, dots, dashes and underscores, a letter or digit at "
    "either end"
)


class SelectConfig(Section):
    """The machines of a pool: those that have all of this. Nothing selects every machine."""

    accelerator: tuple[str, ...] = operational(default=())
    """One of these, by any usual name: `A100`, `H100`, `RTX A6000`, ..."""
    label: dict[str, str] = operational(default={})
    """Ray labels and what they must be: ``value``, ``in(a,b)``, ``!value`` or ``!in(a,b)``; a
    machine without the label is never selected."""
    resource: dict[str, Annotated[float, Field(ge=0.0001, allow_inf_nan=False)]] = operational(
        default={}
    )
    """Ray resources, and how much of each every worker takes."""

    @field_validator("accelerator", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("label")
    @classmethod
    def _expressions(cls, value: dict[str, str]) -> dict[str, str]:
        for key, expression in value.items():
            prefix, _, _ = key.rpartition("/")
            if len(prefix) > 253 or not re.fullmatch(_LABEL_KEY, key):
                raise ValueError(f"{key!r} cannot be the key of a label in Ray; {_LABEL_RULE}")
            if not re.fullmatch(_LABEL_EXPRESSION, expression):
                raise ValueError(
                    f"{key}: {expression!r} is none of value, in(a,b), !value, !in(a,b); "
                    f"{_LABEL_RULE}"
                )
        return value

    @field_validator("resource")
    @classmethod
    def _not_ours(cls, value: dict[str, float]) -> dict[str, float]:
        for name in ("CPU", "GPU", "memory", "object_store_memory"):
            if name in value:
                raise ValueError(f"{name}: every worker takes one CPU, and one GPU if it uses CUDA")
        return value


class PoolConfig(Section):
    """Workers that are alike."""

    name: str | None = operational(default=None)
    """For people; made of what is selected if left out."""
    select: SelectConfig = SelectConfig()
    count: PositiveInt | Auto = operational(default="auto")
    """``auto``: one per GPU of the machines selected, or one per machine if none has one; it
    follows machines that come and go."""
    device: Device = operational(default="auto")
    """``auto``: CUDA where the worker is given a GPU."""
    max_batch: PositiveInt | Auto = operational(default="auto")
    """Most rows live in one engine."""
    threads: PositiveInt | Auto = operational(default="auto")
    """CPU threads of each worker; ``auto``: the machine's cores divided by its workers."""
    price_per_hour: NonNegativeFloat | None = operational(default=None)
    """What one worker costs in dollars for every hour that it holds its place."""
    dtype: Dtype | None = operational(default=None)
    """Instead of ``model.dtype``; needs ``model.allow_mixed_dtype``."""

    @model_validator(mode="after")
    def _has_gpus(self) -> "PoolConfig":
        if self.device == "cpu" and self.select.accelerator:
            raise ValueError("`select.accelerator` needs a device other than cpu")
        return self


class WorkersConfig(Section):
    """The processes that decode, one engine on one device each: a pool of them, or several."""

    count: PositiveInt | Auto = operational(default="auto")
    """``auto``: one per GPU of the cluster, or one per machine if it has none."""
    device: Device = operational(default="auto")
    """``auto``: CUDA where the worker is given a GPU."""
    max_batch: PositiveInt | Auto = operational(default="auto")
    """Most rows live in one engine."""
    threads: PositiveInt | Auto = operational(default="auto")
    """CPU threads of each worker; ``auto``: the node's cores divided by its workers."""
    price_per_hour: NonNegativeFloat | None = operational(default=None)
    """What one worker costs in dollars for every hour that it holds its place."""
    pools: tuple[PoolConfig, ...] = operational(default=())
    """Workers of several kinds, instead of the fields above."""
    profiles: str | None = operational(default=None)
    """Directory or URL where workers share what they measure of their devices; the output's
    own if left out."""

    @model_validator(mode="after")
    def _one_form(self) -> "WorkersConfig":
        both = sorted(self.model_fields_set - {"pools", "profiles"}) if self.pools else []
        if both:
            raise ValueError(f"give `pools` or `{'`, `'.join(both)}`, not both")
        names = [pool.name for pool in self.pools if pool.name is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two pools have the name {twice[0]!r}")
        return self

    def all_pools(self) -> tuple[PoolConfig, ...]:
        """The pools; the fields of the short form are one."""
        if self.pools:
            return self.pools
        own = {name: getattr(self, name) for name in WorkersConfig.model_fields}
        return (PoolConfig(**{k: v for k, v in own.items() if k in PoolConfig.model_fields}),)
