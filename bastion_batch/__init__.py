"""Offline batch generation with speculative decoding: prompts in, completions out.

    import bastion_batch

    job = bastion_batch.load_job("job.yaml")
    result = bastion_batch.run(job)

Importing the package is cheap: torch, Ray and pyarrow are loaded on first use of what needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bastion_batch.cluster.run import run
    from bastion_batch.config import JobConfig, load_job
    from bastion_batch.engine import Engine
    from bastion_batch.io.results import load_steps
    from bastion_batch.report import JobResult

__all__ = [
    "Engine",
    "JobConfig",
    "JobResult",
    "__version__",
    "load_job",
    "load_steps",
    "run",
]

_HOMES = {
    "Engine": "bastion_batch.engine",
    "JobConfig": "bastion_batch.config",
    "JobResult": "bastion_batch.report",
    "load_job": "bastion_batch.config",
    "load_steps": "bastion_batch.io.results",
    "run": "bastion_batch.cluster.run",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
