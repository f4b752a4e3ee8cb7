"""From the names of a target and a drafter to both, loaded, fitting and probed."""

from typing import Any, NamedTuple

import torch

from bastion_batch.engine.checkpoints import (
    ModelFiles,
    load_tokenizer,
    resolve_drafter,
    resolve_target,
)
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.probe import require_right_reading
from bastion_batch.engine.probe_report import ProbeReport, probe_key
from bastion_batch.engine.target import Target
from bastion_batch.engine.vocabularies import require_same_vocabulary


class Pretrained(NamedTuple):
    """What an engine is made of."""

    target_files: ModelFiles
    target: Target
    tokenizer: Any
    drafter_files: ModelFiles | None
    drafter: DFlashDrafter | None
    probe: ProbeReport | None
    """What the drafter's probe found; None if there was none."""

    @property
    def names(self) -> tuple[str, str | None]:
        """Of target and drafter, as they were given."""
        return self.target_files.name, self.drafter_files.name if self.drafter_files else None

    @property
    def digests(self) -> tuple[str, str | None]:
        """Of their files."""
        return self.target_files.digest, self.drafter_files.digest if self.drafter_files else None


def load_pretrained(
    target: str,
    drafter: str | None,
    *,
    revision: str | None,
    dtype: torch.dtype,
    device: torch.device,
    probe: bool,
) -> Pretrained:
    """Load a target and its drafter, if it is to have one; see `Engine.from_pretrained`.

    Raises:
        ModelError: one cannot be found or loaded, they do not fit, or the drafter is better read in
            another way than its files say.
    """
    files = resolve_target(target, revision)
    drafter_files = resolve_drafter(drafter, target)
    if drafter_files is not None:
        require_same_vocabulary(drafter_files.path, files.path)
    model = Target.load(files.path, dtype, device)
    tokenizer = load_tokenizer(files.path)
    if drafter_files is None:
        return Pretrained(files, model, tokenizer, None, None, None)
    draft = load_drafter(drafter_files.path, model)
    report = None
    if probe:
        key = probe_key(files.digest, drafter_files.digest, draft.description)
        report = require_right_reading(draft, model, tokenizer, key)
    return Pretrained(files, model, tokenizer, drafter_files, draft, report)
