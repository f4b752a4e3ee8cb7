"""The lossless gates on CUDA: tiny and random-weight models, no checkpoint, no network.

Text is compared with what plain decoding gives on the same device; greedy text also with
transformers. float64, where near-ties do not fall differently from one kernel to another.
"""

import pytest
import torch
from sampling_reference import ALPHA, chi_square_p, draw
from tiny import fixed_costs, requests, tiny_drafter, tiny_module

from bastion_batch.engine import Engine
from bastion_batch.engine.buckets import exact
from bastion_batch.engine.drafters.fakes import MuteDrafter, RandomDrafter, ScriptedDrafter
from bastion_batch.engine.noise import gumbel_noise
from bastion_batch.engine.sampling import choose
from bastion_batch.engine.step import PassLayout
from bastion_batch.engine.target import Target
from bastion_batch.records import Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def target_of(family: str, device: torch.device, vocab_size: int = 97) -> Target:
    return Target.of_module(tiny_module(family, vocab_size), device)


def outputs_on(device: torch.device, wanted: list[Request], drafter=None, **options):
    target = target_of(options.pop("family", "llama"), device, options.pop("vocab_size", 97))
    drafter = tiny_drafter(target) if drafter == "dflash" else drafter
    engine = Engine(target, drafter, costs=fixed_costs(target), **options)
    found = {c.row_id: c.output_ids for c in engine.generate(wanted)}
    engine.check_integrity()
    return [found[request.row_id] for request in wanted]


@pytest.mark.parametrize("max_batch", [1, 16])
@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "bastion"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_text_is_that_of_the_cpu(family, method, max_batch):
    wanted = requests(COUNT)
    plain = outputs_on(CPU, wanted, family=family, method="ar")
    options = {"family": family, "method": method, "max_batch": max_batch}
    assert outputs_on(CUDA, wanted, "dflash", **options) == plain


@pytest.mark.parametrize("num_nodes", range(0, 65, 4))
def test_no_budget_changes_the_text(num_nodes):
    wanted = requests(COUNT)
    drafter = RandomDrafter(97, depth=5, num_ranks=8, seed=num_nodes)
    options = {"method": "ddtree", "nodes_per_row": num_nodes, "max_batch": 8}
    assert outputs_on(CUDA, wanted, drafter, **options) == outputs_on(CUDA, wanted, method="ar")


SAMPLED = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.05, "logit_bias": ((7, 3.0),)},
    {"temperature": 0.0, "frequency_penalty": 0.7, "banned_ids": (3, 4), "min_new_tokens": 20},
]


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_any_tree_and_batch_give_the_same_samples(sampling):
    wanted = requests(COUNT, **sampling)
    plain = outputs_on(CUDA, wanted, method="ar", max_batch=1)
    scripts = {r.prompt_ids: out for r, out in zip(wanted, plain, strict=True)}
    lazily = PassLayout(draw_all=False, bucket=exact)
    for drafter in (
        ScriptedDrafter(scripts, 97, depth=5),
        ScriptedDrafter(scripts, 97, depth=5, shift=40),
        RandomDrafter(97, depth=4, num_ranks=20),
        MuteDrafter(),
        "dflash",
    ):
        for max_batch in (1, 16):
            assert outputs_on(CUDA, wanted, drafter, max_batch=max_batch) == plain
    random = RandomDrafter(97, depth=4, num_ranks=20)
    assert outputs_on(CUDA, wanted, random, method="ddtree", layout=lazily) == plain


def test_the_noises_bits_are_those_of_the_cpu():
    """The hash is exact; the two logarithms may round differently."""
    keys = list(range(0, 2**64, 2**58))
    on_cuda = gumbel_noise(keys, 50_000, CUDA).cpu()
    torch.testing.assert_close(on_cuda, gumbel_noise(keys, 50_000, CPU), rtol=1e-5, atol=1e-6)


PARAMS = [
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.2}, {"repetition_penalty": 1.7}, {"presence_penalty": 0.9},
    {"banned_ids": (2, 9)}, {"temperature": 1.0, "logit_bias": ((3, 2.5),), "min_new_tokens": 9},
]  # fmt: skip


def test_choosing_never_waits_for_the_device():
    """Any look at the data, and any copy that blocks, raises."""
    draws = [draw(SamplingParams(**p), (1, 2), [3, 3, 4], key=n) for n, p in enumerate(PARAMS * 9)]
    logits = torch.randn(len(draws), 200, dtype=torch.float64, device=CUDA)
    choose(logits, draws)  # once before, so that kernels are loaded and tables made
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = choose(logits, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.tolist() == choose(logits.cpu(), draws).tolist()


def test_samples_of_random_trees_follow_the_law_of_plain_sampling():
    """Two-sample chi-square of the first two tokens, 20,000 rows each; false alarm `ALPHA`."""
    vocab_size, num_rows = 6, 20_000
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=2, ignore_eos=True)
    options = {"vocab_size": vocab_size, "max_batch": 256}

    def counts_of(first_key: int, drafter=None, **how) -> list[int]:
        wanted = [
            Request(row_id=str(n), prompt_ids=(3,), sampling=sampling, noise_key=first_key + n)
            for n in range(num_rows)
        ]
        pairs = outputs_on(CUDA, wanted, drafter, **options, **how)
        cells = torch.tensor([vocab_size * a + b for a, b in pairs])
        return torch.bincount(cells, minlength=vocab_size**2).tolist()

    plain = counts_of(0, method="ar")
    drafter = RandomDrafter(vocab_size, depth=2, num_ranks=vocab_size)
    drawn = counts_of(10**9, drafter, method="bastion")
    mean = [(a + b) / 2 for a, b in zip(plain, drawn, strict=True)]
    apart = [m + 2**0.5 * (b - m) for b, m in zip(drawn, mean, strict=True)]
    assert chi_square_p(apart, mean) > ALPHA, "the sum of (a - b)^2 / (a + b) is too large"
