"""The dtype that a device gets, and what is said of one that it has no units for."""

import pytest
import torch

from bastion_batch.engine.device import pick_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[False, True], ids=["no units", "units"])
def has_units(request, monkeypatch):
    """Whether this CPU claims units for bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return request.param


def test_auto_is_bfloat16_where_there_are_units_for_it(has_units, caplog):
    assert pick_dtype("auto", CPU) is (torch.bfloat16 if has_units else torch.float32)
    assert pick_dtype("auto", CUDA) is torch.bfloat16
    assert not caplog.text


def test_what_is_asked_for_is_taken_and_a_slow_choice_told(has_units, caplog):
    assert pick_dtype("float32", CPU) is torch.float32
    assert pick_dtype("bfloat16", CUDA) is torch.bfloat16
    assert not caplog.text
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    assert ("has no units for it" in caplog.text) is not has_units
