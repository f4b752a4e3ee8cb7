"""What is put by comes out as it went in, row by row, and places are never shared."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.engine.buckets import coarse, exact
from bastion_batch.engine.drafters.pending import PLACES_PER_ROW, PendingTaps, in_batches

NUM_FEATURES = 3
proven = settings(derandomize=True, deadline=None, max_examples=60)
actions = st.one_of(
    st.tuples(st.just("put"), st.dictionaries(st.integers(0, 5), st.integers(0, 150), min_size=1)),
    st.tuples(st.just("take"), st.dictionaries(st.integers(0, 5), st.integers(1, 200))),
    st.tuples(st.just("drop"), st.integers(0, 5)),
)


@proven
@given(st.lists(actions, max_size=30))
def test_rows_get_back_what_was_put_by_for_them(steps):
    pending = PendingTaps(NUM_FEATURES, torch.float32, torch.device("cpu"))
    waiting: dict[int, list[int]] = {}
    number = 0
    for action, what in steps:
        if action == "put":
            counts = {k: n for k, n in what.items() if pending.has_room(k, n)}
            tokens = []
            for key, count in counts.items():
                mine = range(number, number + count)
                number += count
                waiting.setdefault(key, []).extend(mine)
                tokens.extend(mine)
            features = torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, NUM_FEATURES)
            pending.put(list(counts), list(counts.values()), features)
        elif action == "take":
            oldest = {k: min(n, len(waiting.get(k, []))) for k, n in what.items()}
            if not any(oldest.values()):
                continue
            counts, features = pending.take(oldest, coarse)
            assert counts == list(oldest.values())
            tokens = [float(t) for k, n in oldest.items() for t in waiting.get(k, [])[:n]]
            for key, count in oldest.items():
                del waiting.get(key, [])[:count]
            padding = tokens[-1:] * (coarse(len(tokens)) - len(tokens))
            assert features[:, 0].tolist() == tokens + padding
        else:
            pending.drop(what)
            waiting.pop(what, None)
        for key in range(6):
            assert pending.num_tokens(key) == len(waiting.get(key, []))
            assert pending.has_room(key, PLACES_PER_ROW - len(waiting.get(key, [])))
            assert not pending.has_room(key, PLACES_PER_ROW + 1 - len(waiting.get(key, [])))


def test_places_are_used_again_without_end():
    pending = PendingTaps(NUM_FEATURES, torch.float32, torch.device("cpu"))
    for key in range(1_000):
        pending.put([key], [2], torch.full((2, NUM_FEATURES), float(key)))
        pending.drop(key - 2)
    assert pending.held_bytes <= 4 * pending.bytes_per_row
    taken = pending.take({999: 2, 998: 2}, exact)
    assert taken.features_SF[:, 0].tolist() == [999, 999, 998, 998]


@proven
@given(
    st.lists(st.integers(0, PLACES_PER_ROW), max_size=20),
    st.integers(1, 3 * PLACES_PER_ROW),
)
def test_batches_hold_every_waiting_row_once_and_as_many_as_fit(counts, num_tokens):
    batches = list(in_batches(dict(enumerate(counts)), num_tokens))
    together = [row for batch in batches for row in batch.items()]
    assert together == [(key, count) for key, count in enumerate(counts) if count]
    sizes = [sum(batch.values()) for batch in batches]
    assert all(n <= num_tokens or len(b) == 1 for n, b in zip(sizes, batches, strict=True))
    first_of_next = [next(iter(batch.values())) for batch in batches[1:]]
    assert all(n + more > num_tokens for n, more in zip(sizes, first_of_next, strict=False))
