"""What memory is left, by control groups made of plain files."""

from pathlib import Path

import pytest
import torch

from bastion_batch.engine.memory import available_bytes, cgroup_rooms

MB = 1 << 20


def write_group(place: Path, names: tuple[str, str, str], limit: object, used: int, file: int):
    place.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, stat_name = names
    (place / limit_name).write_text(f"{limit}\n")
    (place / usage_name).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 5\n{stat_name} {file}\nactive_file 7\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_the_groups_around_a_process_bind_it_too(tmp_path):
    write_group(tmp_path / "jobs", V2, 300 * MB, 250 * MB, 20 * MB)
    write_group(tmp_path / "jobs/a", V2, 200 * MB, 100 * MB, 10 * MB)
    write_group(tmp_path / "jobs/a/b", V2, "max", 90 * MB, 0)
    rooms = list(cgroup_rooms("0::/jobs/a/b\n", tmp_path))
    assert rooms == [110 * MB, 70 * MB]


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    """Its path may be the host's, which does not exist inside."""
    write_group(tmp_path, V2, 100 * MB, 30 * MB, 0)
    assert list(cgroup_rooms("0::/\n", tmp_path)) == [70 * MB]
    assert list(cgroup_rooms("0::/docker/1234\n", tmp_path)) == [70 * MB]


def test_version_1_has_a_tree_of_its_own_for_memory(tmp_path):
    write_group(tmp_path / "memory/docker/12", V1, 100 * MB, 40 * MB, 5 * MB)
    groups = "5:cpu,cpuacct:/docker/12\n4:memory:/docker/12\n0::/\n"
    assert list(cgroup_rooms(groups, tmp_path)) == [65 * MB]


def test_nothing_is_negative_and_nothing_is_no_limit(tmp_path):
    write_group(tmp_path / "over", V2, 10 * MB, 30 * MB, 0)
    assert list(cgroup_rooms("0::/over\n", tmp_path)) == [0]
    assert list(cgroup_rooms("", tmp_path)) == []
    assert list(cgroup_rooms("0::/elsewhere\n", tmp_path / "none")) == []


def test_this_machine_has_memory():
    assert available_bytes(torch.device("cpu")) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_this_device_has_memory():
    assert available_bytes(torch.device("cuda")) > 0
