"""One thread for every test: tiny models gain nothing from more, and cores are shared.

Profiles of test runs go to a directory of their own: what a busy machine measured is no use later.
"""

import os
import tempfile

import pytest
import torch

torch.set_num_threads(1)

_profiles = tempfile.TemporaryDirectory(prefix="bastion_batch_profiles_")
os.environ["BASTION_BATCH_PROFILES"] = _profiles.name


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster that a module's tests add machines to."""
    from ray_nodes import SOON, Nodes

    with pytest.MonkeyPatch.context() as environment:
        for name, value in SOON.items():
            environment.setenv(name, value)
        nodes = Nodes()
        yield nodes
        nodes.cluster.shutdown()


@pytest.fixture
def nodes(cluster):
    """The module's cluster; the machines that a test adds are gone after it."""
    yield cluster
    cluster.clear()
