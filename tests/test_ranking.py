"""The best tokens by blocks are those that sorting the vocabulary finds."""

import math

import pytest
import torch

from bastion_batch.engine.drafters.ranking import BLOCK_SIZE, best_tokens

NOBODY = 1 << 40


def reference(logits: torch.Tensor, num_ranks: int, banned_id: int) -> torch.Tensor:
    logits = logits.double().clone()
    if banned_id < logits.shape[1]:
        logits[:, banned_id] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_slots", "vocab_size", "num_ranks", "banned_id"),
    [
        (7, 49_152, 64, 0),
        (20, 5_000, 64, 17),
        (3, 4 * BLOCK_SIZE + 1, 3, NOBODY),
        (2, 13, 64, 3),
        (1, 13, 4, NOBODY),
        (9, 64 * BLOCK_SIZE, 64, 5),
        (9, 65 * BLOCK_SIZE - 1, 64, 5),
    ],
)
def test_the_best_tokens_and_their_probabilities(
    num_slots, vocab_size, num_ranks, banned_id, dtype
):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (4 * torch.randn(num_slots, vocab_size, generator=generator)).to(dtype)
    before = logits.clone()
    found = best_tokens(logits, num_ranks, banned_id)
    assert torch.equal(logits, before)
    expected = reference(logits, num_ranks, banned_id)
    best = expected.topk(min(num_ranks, vocab_size), -1).values
    torch.testing.assert_close(found.log_probs_SK.double(), best, atol=1e-5, rtol=1e-6)
    of_these = expected.gather(-1, found.token_ids_SK)
    torch.testing.assert_close(of_these, best, atol=1e-5, rtol=1e-6)
    assert (found.token_ids_SK < vocab_size).all()
    for ids in found.token_ids_SK.tolist():
        assert len(set(ids)) == len(ids)


def test_ties_are_no_trouble():
    found = best_tokens(torch.zeros(2, 40 * BLOCK_SIZE), 20, NOBODY)
    expected = torch.full((2, 20), -float(torch.tensor(40.0 * BLOCK_SIZE).log()))
    torch.testing.assert_close(found.log_probs_SK, expected)
    assert all(len(set(ids)) == 20 for ids in found.token_ids_SK.tolist())


def test_certainty_has_log_probability_zero():
    logits = torch.full((1, 100 * BLOCK_SIZE), -1e4)
    logits[0, 77] = 50.0
    found = best_tokens(logits, 8, NOBODY)
    assert found.token_ids_SK[0, 0] == 77
    assert found.log_probs_SK[0, 0] == 0
    assert (found.log_probs_SK <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_the_first_of_equals_is_taken_and_what_is_no_number_never(dtype):
    logits = torch.zeros(3, 5 * BLOCK_SIZE, dtype=dtype)
    logits[0, [3, 70, 90]] = torch.nan
    logits[1] = torch.nan
    logits[2, [90, 40]] = 2.0
    found = best_tokens(logits, 4, 0)
    assert found.token_ids_SK.tolist()[0] == [1, 2, 4, 5]
    assert found.token_ids_SK.tolist()[2] == [40, 90, 1, 2]
    torch.testing.assert_close(found.log_probs_SK[0], torch.full((4,), -math.log(156)))
    assert (found.log_probs_SK[1] == -torch.inf).all()
    none = best_tokens(logits[:0], 4, 0)
    assert none.token_ids_SK.shape == none.log_probs_SK.shape == (0, 4)
