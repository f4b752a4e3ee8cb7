"""One thread for every test: tiny models gain nothing from more, and cores are shared.

Profiles of test runs go to a directory of their own: what a busy machine measured is no use later.
"""

import os
import tempfile

import torch

torch.set_num_threads(1)

_profiles = tempfile.TemporaryDirectory(prefix="bastion_batch_profiles_")
os.environ["BASTION_BATCH_PROFILES"] = _profiles.name
