"""A job: its sections, and what is decided from several of them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, model_validator
from pydantic.fields import FieldInfo

from bastion_batch.config.fields import Section, operational
from bastion_batch.config.pools import PoolConfig, WorkersConfig
from bastion_batch.config.sections import (
    DecodingConfig,
    InputConfig,
    LimitsConfig,
    ModelConfig,
    OutputConfig,
)


class JobConfig(Section):
    """One job: a dataset of prompts in, a dataset of completions out."""

    name: str = operational(default="job")
    """For people; it appears in logs and reports."""
    input: InputConfig
    output: OutputConfig
    model: ModelConfig
    decoding: DecodingConfig = DecodingConfig()
    workers: WorkersConfig = WorkersConfig()
    limits: LimitsConfig = LimitsConfig()

    def identity_fields(self) -> dict[str, Any]:
        """The dotted names and values of the fields that decide what the output is."""
        return {
            name: getattr(section, field)
            for name, section, field, info in _leaves(self)
            if _is_identity(info)
        }

    @model_validator(mode="after")
    def _one_dtype(self) -> "JobConfig":
        for number, pool in enumerate(self.workers.pools):
            if pool.dtype is not None and not self.model.allow_mixed_dtype:
                raise ValueError(
                    f"workers.pools.{number}.dtype is {pool.dtype}, but a job has one dtype, "
                    "model.dtype, unless model.allow_mixed_dtype is true"
                )
        return self

    def with_pool(self, pool: PoolConfig) -> "JobConfig":
        """The job as the workers of one pool are to see it: as if there were no others."""
        shared = WorkersConfig.model_fields.keys() & PoolConfig.model_fields.keys()
        own = {name: getattr(pool, name) for name in shared}
        workers = WorkersConfig(**own, profiles=self.workers.profiles)
        model = self.model.model_copy(update={"dtype": pool.dtype or self.model.dtype})
        return self.model_copy(update={"workers": workers, "model": model})

    def with_absolute_paths(self, base: Path) -> "JobConfig":
        """The same job with local relative paths resolved against `base`."""
        paths = tuple(_absolute(p, base) for p in self.input.paths)
        profiles = self.workers.profiles
        return self.model_copy(
            update={
                "input": self.input.model_copy(
                    update={"path": paths[0] if isinstance(self.input.path, str) else paths}
                ),
                "output": self.output.model_copy(
                    update={"path": _absolute(self.output.path, base)}
                ),
                "model": self.model.model_copy(
                    update={
                        "target": _absolute_directory(self.model.target, base),
                        "drafter": self.model.drafter
                        and _absolute_directory(self.model.drafter, base),
                    }
                ),
                "workers": self.workers.model_copy(
                    update={"profiles": profiles and _absolute(profiles, base)}
                ),
            }
        )


def _leaves(job: JobConfig) -> Iterable[tuple[str, BaseModel, str, FieldInfo]]:
    for name, info in JobConfig.model_fields.items():
        value = getattr(job, name)
        if isinstance(value, BaseModel):
            for field, leaf in type(value).model_fields.items():
                yield f"{name}.{field}", value, field, leaf
        else:
            yield name, job, name, info


def _is_identity(info: FieldInfo) -> bool:
    tags = info.json_schema_extra
    assert isinstance(tags, dict), "every field is tagged"
    return bool(tags["identity"])


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str(base / Path(path).expanduser())


def _absolute_directory(name: str, base: Path) -> str:
    """A model's name, made absolute if it is the path of a directory here."""
    is_path = os.sep in name and Path(_absolute(name, base)).is_dir()
    return _absolute(name, base) if is_path else name
