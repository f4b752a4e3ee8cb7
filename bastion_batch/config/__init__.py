"""The job: its fields, their limits, and how a job file becomes one.

Every field is tagged identity or operational. Identity fields decide what the output is and are
frozen by the plan; operational fields may change from one invocation of a job to the next.
"""

from bastion_batch.config.fields import Device, Dtype
from bastion_batch.config.files import load_job, parse_job
from bastion_batch.config.job import JobConfig
from bastion_batch.config.pools import PoolConfig, SelectConfig, WorkersConfig
from bastion_batch.config.sections import (
    MIN_TEMPERATURE,
    DecodingConfig,
    InputConfig,
    LimitsConfig,
    ModelConfig,
    OutputConfig,
)

__all__ = [
    "MIN_TEMPERATURE",
    "DecodingConfig",
    "Device",
    "Dtype",
    "InputConfig",
    "JobConfig",
    "LimitsConfig",
    "ModelConfig",
    "OutputConfig",
    "PoolConfig",
    "SelectConfig",
    "WorkersConfig",
    "load_job",
    "parse_job",
]
