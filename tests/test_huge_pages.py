"""Weights and caches in huge pages: what is found, what is asked for, and that nothing depends on it."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bastion_batch.engine import huge_pages
from bastion_batch.engine.linear import Linear, reordered

MIB = 1 << 20
CPU = torch.device("cpu")


def kib_in_huge_pages(tensor: Tensor) -> int:
    """Of the mapping in which the middle of a tensor lies: advice parts what is beside it."""
    address, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        ends = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if ends:
            inside = int(ends[1], 16) <= address < int(ends[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
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
    linears = [Linear(torch.randn(700, 700)) for _ in range(5)]  # 1.96 MB: less than a page each
    tied = linears[0]._weight
    num_huge = huge_pages.move_to_huge_pages({"layers": (linears, [linears[1]])}, tied)
    expected = set()
    for linear in linears:
        expected |= pages_of(linear._weight.data_ptr(), linear._weight.nbytes)
    assert [address for address, _, _ in advice] == sorted(expected)
    assert num_huge == len(expected)
    assert {num_bytes for _, num_bytes, _ in advice} == {huge_pages.PAGE_BYTES}


def test_weights_in_the_layout_of_onednn_are_found(advice):
    weight = torch.randn(2048, 1024).bfloat16()
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
    assert not huge_pages.zeros((3, MIB), torch.int32, CPU).any()


def test_elsewhere_than_on_linux_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    huge_pages._madvise.cache_clear()
    try:
        assert huge_pages.move_to_huge_pages([torch.ones(2 * MIB)]) == 0
        assert huge_pages.zeros((2, 3), torch.bfloat16, CPU).tolist() == [[0, 0, 0], [0, 0, 0]]
    finally:
        huge_pages._madvise.cache_clear()


@pytest.mark.parametrize("shape", [(0,), (5,), (2, 300, 7), (30, 4 * MIB)])
def test_zeros_are_zeros(shape):
    found = huge_pages.zeros(shape, torch.uint8, CPU)
    assert found.shape == shape
    assert found.dtype == torch.uint8
    assert not found.any()


def kernel_has_huge_pages() -> bool:
    """Whether it gives them now: where memory is in pieces it may have none."""
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.fill_(1)
    return kib_in_huge_pages(tensor) >= 32 * 1024


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="the system has no transparent huge pages",
)
def test_the_kernel_gives_huge_pages_to_what_is_new():
    found = huge_pages.zeros((64 * MIB,), torch.uint8, CPU)
    if kib_in_huge_pages(found) < 32 * 1024 and not kernel_has_huge_pages():
        pytest.skip("the kernel has no huge pages to give now")
    assert kib_in_huge_pages(found) >= 32 * 1024, "most of it, however full the memory is"
