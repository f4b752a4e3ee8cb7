"""What is put by comes out as it went in, row by row, and places are never shared."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.engine.drafters.pending import PLACES_PER_ROW, PendingTaps

NUM_FEATURES = 3
proven = settings(derandomize=True, deadline=None, max_examples=60)
actions = st.one_of(
    st.tuples(st.just("put"), st.dictionaries(st.integers(0, 5), st.integers(0, 40), min_size=1)),
    st.tuples(st.just("take"), st.lists(st.integers(0, 5), unique=True)),
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
            counts, features = pending.take(what)
            expected = [waiting.pop(key, []) for key in what]
            assert counts == [len(part) for part in expected]
            assert features[:, 0].tolist() == [float(t) for part in expected for t in part]
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
    assert pending.take([999, 998]).features_SF[:, 0].tolist() == [999, 999, 998, 998]
