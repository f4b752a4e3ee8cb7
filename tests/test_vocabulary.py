"""Rare tokens are left out of drafting once they prove useless, and come back with other text."""

import numpy as np
import pytest

from bastion_batch.core.vocabulary import MIN_ACCEPTED, DraftVocabulary

V = 4096


def feed(vocabulary: DraftVocabulary, steps: int, rare: float, lost: float, seed: int = 0) -> None:
    """Steps of four tokens, two of them accepted, with given shares in the upper half."""
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        share = np.array([lost, lost, rare, rare])
        ids = generator.integers(0, V // 8, 4) + (generator.random(4) < share) * (V // 2)
        vocabulary.observe(ids.tolist(), ids[:2].tolist())


def test_all_is_scored_until_enough_was_accepted():
    vocabulary = DraftVocabulary(V)
    feed(vocabulary, MIN_ACCEPTED // 2 - 1, rare=0.2, lost=0)
    assert vocabulary.num_ids == V
    feed(vocabulary, 1, rare=0.2, lost=0)
    assert vocabulary.num_ids == V // 8, "rare text alone does not matter: it is never accepted"


def test_nothing_is_left_out_while_it_is_accepted():
    vocabulary = DraftVocabulary(V)
    feed(vocabulary, 2000, rare=0.2, lost=0.05)
    assert vocabulary.num_ids == V


def test_the_smallest_part_that_loses_next_to_nothing_is_taken():
    vocabulary = DraftVocabulary(V)
    ids = [V // 4 - 1] * 10
    for _ in range(MIN_ACCEPTED):
        vocabulary.observe(ids, ids)
    assert vocabulary.num_ids == V // 4


def test_bad_luck_at_the_beginning_is_made_up_for():
    vocabulary = DraftVocabulary(V)
    frequent, rare = [3] * MIN_ACCEPTED, [V // 8] * 3
    vocabulary.observe(frequent + rare, frequent + rare)
    assert vocabulary.num_ids == V // 4, "three of a hundred are too many"
    vocabulary.observe(frequent, frequent)
    assert vocabulary.num_ids == V // 8, "of two hundred they are not"
    vocabulary.observe([V // 8] * 50, [])
    assert vocabulary.num_ids == V, "and what is left out by mistake comes back"


def test_text_of_another_nature_opens_it_again():
    vocabulary = DraftVocabulary(V)
    feed(vocabulary, 1000, rare=0.1, lost=0)
    assert vocabulary.num_ids == V // 8
    feed(vocabulary, 3000, rare=0.12, lost=0, seed=1)
    assert vocabulary.num_ids == V // 8, "chance alone does not"
    feed(vocabulary, 1000, rare=0.6, lost=0.6, seed=2)
    assert vocabulary.num_ids == V


@pytest.mark.parametrize("vocab_size", [1, 97, 300])
def test_a_small_vocabulary_is_scored_whole_or_nearly(vocab_size):
    vocabulary = DraftVocabulary(vocab_size)
    for _ in range(MIN_ACCEPTED):
        vocabulary.observe([0, 0], [0, 0])
    assert vocabulary.num_ids == min(vocab_size, 256)
    vocabulary.observe([], [])
