"""Weights and caches in huge pages: what is found, what is asked for, and that nothing depends on it."""

import re
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bastion_batch.engine import huge_pages
from bastion_batch.engine.linear import Linear, reordered

MIB = 1 << 20
CPU = torch.device("cpu")


def flags_of(tensor: Tensor) -> list[str]:
    """Of the mapping in which the middle of a tensor lies: advice parts what is beside it."""
    address, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        ends = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if ends:
            inside = int(ends[1], 16) <= address < int(ends[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds the tensor")


@pytest.fixture
def advice(monkeypatch):
    """What the kernel is asked, and it always agrees."""
    asked = []

    def madvise(address, num_bytes, kind):
        asked.append((address, num_bytes, kind))
        return 0

    monkeypatch.setattr(huge_pages, "_madvise", lambda: madvise)
    return asked


def pages_of(address: int, num_bytes: int) -> set[int]:
    size = huge_pages.PAGE_BYTES
    return {page * size for page in range(address // size, (address + num_bytes - 1) // size + 1)}


def test_every_page_on_which_a_weight_lies_is_asked_for_once(advice):
    torch.manual_seed(0)
    linears = [
        Linear(torch.randn(495, 495).double()) for _ in range(5)
    ]  # 1.96 MB: less than a page
    tied = linears[0]._weight
    num_huge = huge_pages.move_to_huge_pages({"layers": (linears, [linears[1]])}, tied)
    expected = set()
    for linear in linears:
        expected |= pages_of(linear._weight.data_ptr(), linear._weight.nbytes)
    assert [address for address, _, _ in advice] == sorted(expected)
    assert num_huge == len(expected)
    assert {num_bytes for _, num_bytes, _ in advice} == {huge_pages.PAGE_BYTES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_the_layout_of_onednn_are_found(advice, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    weight = torch.randn(4 * MIB // dtype.itemsize // 1024, 1024).to(dtype)
    laid_out = reordered(weight)
    if laid_out is weight:
        pytest.skip("this machine lays nothing out")
    huge_pages.move_to_huge_pages([laid_out])
    assert len(advice) in (2, 3), "4 MiB, wherever they begin"


def test_nothing_outside_the_package_is_walked(advice):
    class Stranger:
        def __init__(self) -> None:
            self.weight = torch.ones(MIB)

    huge_pages.move_to_huge_pages(Stranger(), "a name", 3, None, torch.empty(0))
    assert not advice


def test_a_large_model_ends_after_a_bounded_time(advice, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(huge_pages.time, "perf_counter", lambda: next(clock))
    weight = torch.empty(20 * huge_pages.PAGE_BYTES, dtype=torch.uint8)
    assert huge_pages.move_to_huge_pages([weight]) == huge_pages.MAX_SECONDS


def test_a_kernel_that_declines_changes_nothing(monkeypatch):
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *_: -1)
    weight = torch.arange(2 * MIB)
    assert huge_pages.move_to_huge_pages([weight]) == 0
    assert torch.equal(weight, torch.arange(2 * MIB))
    assert huge_pages.empty((3, MIB), torch.int32, CPU).shape == (3, MIB)


def test_elsewhere_than_on_linux_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    huge_pages._madvise.cache_clear()
    try:
        assert huge_pages.move_to_huge_pages([torch.ones(2 * MIB)]) == 0
        assert huge_pages.empty((2, 3), torch.bfloat16, CPU).shape == (2, 3)
    finally:
        huge_pages._madvise.cache_clear()


@pytest.mark.parametrize("shape", [(0,), (5,), (2, 300, 7), (30, 4 * MIB)])
def test_new_memory_is_as_asked_for_and_all_of_it_can_be_used(shape):
    found = huge_pages.empty(shape, torch.uint8, CPU)
    assert found.shape == shape
    assert found.dtype == torch.uint8
    assert (found.fill_(7) == 7).all()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="the system has no transparent huge pages",
)
def test_the_kernel_is_asked_for_huge_pages_for_what_is_new():
    """Whether it has any to give at that moment is its own affair."""
    never_advised = mmap(-1, 64 * MIB, MAP_PRIVATE | MAP_ANONYMOUS)  # a heap may have been
    assert "hg" not in flags_of(torch.frombuffer(never_advised, dtype=torch.uint8))
    assert "hg" in flags_of(huge_pages.empty((64 * MIB,), torch.uint8, CPU))
