"""What makes a job that job: whoever runs it again must ask for the same.

Identity decides what the output is. Where the input files lie, how much is recorded of the steps
and how the work is done may change between invocations, and are no part of it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from bastion_batch.config import JobConfig
from bastion_batch.core.noise import NOISE_VERSION
from bastion_batch.errors import OutputError
from bastion_batch.io.plan import PLAN_FORMAT, Plan
from bastion_batch.io.prompts import PROMPT_VERSION
from bastion_batch.io.schemas import SCHEMA_VERSION
from bastion_batch.io.sources import InputFile

_MEANT_BY_OLDER = {"model.allow_mixed_dtype": False}
"""What a plan means that was made before there was this field."""


class TargetFiles(Protocol):
    """What identity needs to know of a target."""

    @property
    def digest(self) -> str:
        """Identifies weights, tokenizer and chat template."""


def job_identity(job: JobConfig, target: TargetFiles, files: Sequence[InputFile]) -> dict[str, Any]:
    """Everything that decides what the output is, as JSON values."""
    identity = {
        **job.identity_fields(),
        "input.files": [file.identity for file in files],
        "target_digest": target.digest,
        "noise_version": NOISE_VERSION,
        "prompt_version": PROMPT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "plan_format": PLAN_FORMAT,
    }
    return json.loads(json.dumps(identity))


def require_same_job(
    existing: Plan, identity: Mapping[str, Any], *, output: str = "the output"
) -> None:
    """Check that a job is the one that was planned.

    Raises:
        OutputError: listing every identity field that differs, with both values.
    """
    planned = _MEANT_BY_OLDER | existing.identity
    names = sorted({*planned, *identity})
    pairs = {name: (planned.get(name), identity.get(name)) for name in names}
    lines = [
        f"  {name}: {shown.planned} -> {shown.now}"
        for name, (old, new) in pairs.items()
        if old != new
        for shown in [differences(old, new)]
    ]
    if lines:
        raise OutputError(
            f"{output} holds a different job; give another output.path, or restore what differs"
            " (planned -> now):\n" + "\n".join(lines)
        )


class Differences(NamedTuple):
    """Two values as they are shown beside each other."""

    planned: str
    now: str


def differences(planned: Any, now: Any) -> Differences:  # noqa: ANN401 - any JSON values
    """Both values; of two lists only the items that the other one does not have."""
    if _are_names(planned) and _are_names(now) and set(planned) != set(now):
        gone, added = set(planned) - set(now), set(now) - set(planned)
        planned = [item for item in planned if item in gone]
        now = [item for item in now if item in added]
    return Differences(_show(planned), _show(now))


def _are_names(value: Any) -> bool:  # noqa: ANN401 - any JSON value
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _show(value: Any) -> str:  # noqa: ANN401 - any JSON value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}..."
