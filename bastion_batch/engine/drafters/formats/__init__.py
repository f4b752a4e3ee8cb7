"""Packagings of drafter checkpoints, each read into a `DrafterDescription`.

`describe` looks at a checkpoint directory and decides which packaging it is (`detect`); one module
per packaging reads it. None of them guesses: a key that changes the model is mandatory or has the
default of the code that wrote the file, one that is not understood is refused by name, and so is a
family whose computation is not here. Every tensor of a file is claimed, in its shape, or named.

Only configurations, tensor headers and vocabulary maps are read, without torch, so that a wrong
drafter costs a second and not a start-up.
"""

from bastion_batch.engine.drafters.formats.detect import describe, describe_directory
from bastion_batch.engine.drafters.formats.source import DrafterSource

__all__ = ["DrafterSource", "describe", "describe_directory"]
