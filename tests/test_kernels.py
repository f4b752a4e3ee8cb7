"""The compiled loops give what torch's own operations give."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bastion_batch.engine import kernels, sampling
from bastion_batch.engine.kernels import argmax, has_argmax
from bastion_batch.engine.linear import GatedLinear, Linear, is_reordered

EPS = 1e-5


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))).bfloat16()


def off_by_more_than_one_rounding(got: torch.Tensor, exact: torch.Tensor) -> int:
    """Values further from the exact ones than bfloat16's spacing."""
    spacing = exact.abs().clamp_min(1e-30).log2().floor().exp2() * 2.0**-7
    return int(((got.double() - exact).abs() > spacing).sum())


@pytest.mark.parametrize("num_tokens", [1, 3, kernels.MAX_TOKENS])
@pytest.mark.parametrize("size", [48, 576])
def test_rms_norm(num_tokens, size):
    x, weight = random(num_tokens, size, scale=3), random(size)
    exact = F.rms_norm(x.double(), (size,), weight.double(), EPS)
    assert off_by_more_than_one_rounding(kernels.rms_norm(x, weight, EPS), exact) == 0


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_rotate_heads(num_tokens, with_norm):
    num_heads, num_rotated, size = 7, 5, 32
    heads = random(num_tokens, num_heads, size)
    angles = torch.rand(num_tokens, 1, size // 2).double().repeat(1, 1, 2)
    sign = torch.cat([-torch.ones(size // 2), torch.ones(size // 2)])
    cos, sin = angles.cos().bfloat16(), (angles.sin() * sign).bfloat16()
    norm = random(num_rotated, size) if with_norm else None
    exact = heads.double()
    if norm is not None:
        normed = F.rms_norm(exact[:, :num_rotated], (size,), None, EPS) * norm.double()
        exact = torch.cat([normed, exact[:, num_rotated:]], 1)
    rotated = exact[:, :num_rotated]
    exact[:, :num_rotated] = rotated * cos + rotated.roll(size // 2, -1) * sin
    kernels.rotate_heads(heads, num_rotated, norm, EPS, cos, sin)
    spacing = exact.abs().max() * 2.0**-8  # sums cancel: the spacing of the summands
    assert (heads.double() - exact).abs().max() <= spacing
    assert torch.equal(heads[:, num_rotated:].double(), exact[:, num_rotated:])


def test_what_is_not_finite_stays_so():
    x = random(3, 64)
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    out = kernels.rms_norm(x, random(64), EPS)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert out[2].isnan().any()


def test_they_suit_few_bfloat16_tokens_on_a_cpu():
    assert kernels.suits(random(kernels.MAX_TOKENS, 8))
    assert not kernels.suits(random(kernels.MAX_TOKENS + 1, 8))
    assert not kernels.suits(random(1, 8).float())
    assert not kernels.suits(torch.empty(1, 8, dtype=torch.bfloat16, device="meta"))


@pytest.fixture(params=["AVX2", "AVX512"])
def capability(request, monkeypatch):
    """What torch says that it uses of this CPU."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return request.param


def test_float32_is_reordered_where_there_is_nothing_wider_than_avx2(capability):
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert is_reordered(torch.bfloat16, cpu)
    assert is_reordered(torch.float32, cpu) is (capability == "AVX2")
    assert not is_reordered(torch.float64, cpu)
    assert not is_reordered(torch.bfloat16, meta)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_and_what_follows_them(dtype):
    x, other = random(5, 48).to(dtype), random(5, 32).to(dtype)
    weight, up = random(32, 48, scale=0.2).to(dtype), random(32, 48, scale=0.2).to(dtype)
    exact_x, exact_weight, exact_up = x.double(), weight.double(), up.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    expected = F.linear(exact_x, exact_weight)
    gated = F.silu(expected) * F.linear(exact_x, exact_up)
    bias = random(32).to(dtype)
    biased = F.silu(expected + bias) * (F.linear(exact_x, exact_up) + bias)
    for got, exact in [
        (Linear(weight)(x), expected),
        (Linear(weight).plus(x, other), other.double() + expected),
        (GatedLinear(weight, up, bias, bias)(x), biased),
        (GatedLinear(weight, up)(x), gated),
    ]:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 31, 512, 513, 49_152])
def test_the_largest_logit_is_found_and_of_several_the_first(size, dtype):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(9, size + 3, generator=generator).to(dtype)[:, :size]
    logits[3, [size // 3, size // 2, size - 1]] = 50.0
    logits[4] = -torch.inf
    logits[5, : size - 1] = torch.nan
    assert has_argmax(logits)
    found = argmax(logits).tolist()
    rows = torch.nan_to_num(logits.float(), nan=-torch.inf).numpy()
    assert found == [int(np.argmax(row)) for row in rows]
    assert found[3] == size // 3


def test_what_is_not_packed_is_left_to_torch():
    logits = torch.randn(5, 7).to(torch.bfloat16).T
    assert not has_argmax(logits)
    assert sampling.argmax(logits).tolist() == logits.max(-1).indices.tolist()
