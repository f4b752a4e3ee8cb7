"""No tree holds what the rows' sampling forbids, and nothing follows an end."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.engine.drafters import Marginals
from bastion_batch.engine.limits import allowed
from bastion_batch.engine.row import Row
from bastion_batch.records import Request, SamplingParams

VOCAB, DEPTH, RANKS = 12, 4, 6
WRITTEN = 4
END_IDS = frozenset({1, 7})
proven = settings(derandomize=True, deadline=None, max_examples=40)
ids = st.lists(
    st.integers(0, VOCAB - 1).filter(lambda token: token != WRITTEN), max_size=5, unique=True
).map(tuple)
sampling = st.builds(
    SamplingParams,
    banned_ids=ids,
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    min_new_tokens=st.integers(0, 8),
)


def row_of(number: int, params: SamplingParams, num_output: int = 0) -> Row:
    request = Request(
        row_id=str(number),
        prompt_ids=(2, 3),
        generated_ids=(WRITTEN,) * num_output,
        sampling=params,
    )
    row = Row(request, number, END_IDS, None)
    if len(row.output_ids) < num_output:
        row.commit(request.generated_ids, 512)
    return row


def proposals(seed: int, num_rows: int) -> Marginals:
    generator = np.random.default_rng(seed)
    token_ids = generator.random((num_rows, DEPTH, VOCAB)).argsort(-1)[:, :, :RANKS]
    log_probs = -np.sort(generator.exponential(2, token_ids.shape), -1).astype(np.float32)
    return Marginals(log_probs, token_ids)


@proven
@given(st.lists(st.tuples(sampling, st.integers(0, 6)), min_size=1, max_size=3), st.integers(0, 99))
def test_what_is_left_is_what_may_be_emitted(params, seed):
    rows = [row_of(number, *pair) for number, pair in enumerate(params)]
    marginals = proposals(seed, len(rows))
    before = [part.copy() for part in marginals]
    (log_probs, token_ids), leaves = allowed(marginals, rows, END_IDS)
    for part, old in zip(marginals, before, strict=True):
        np.testing.assert_array_equal(part, old)
    assert (log_probs[:, :, 1:] <= log_probs[:, :, :-1]).all(), "decreasing"
    for number, (row, (one, num_output)) in enumerate(zip(rows, params, strict=True)):
        ends = one.end_ids(END_IDS)
        for depth in range(DEPTH):
            too_early = num_output + depth < one.min_new_tokens
            forbidden = {*one.banned_ids, *(ends if too_early else ())}
            given_here = dict(
                zip(before[1][number, depth].tolist(), before[0][number, depth], strict=True)
            )
            left = {}
            for token, log_prob, leaf in zip(
                token_ids[number, depth].tolist(),
                log_probs[number, depth],
                leaves[number, depth],
                strict=True,
            ):
                assert leaf == (token in ends)
                if log_prob > -np.inf:
                    left[token] = log_prob
            assert left == {t: lp for t, lp in given_here.items() if t not in forbidden}
        assert row.output_ids == [WRITTEN] * num_output


def test_where_nothing_is_forbidden_nothing_is_copied():
    marginals = proposals(0, 2)
    rows = [row_of(0, SamplingParams()), row_of(1, SamplingParams(ignore_eos=True))]
    kept, leaves = allowed(marginals, rows, END_IDS)
    assert kept is marginals
    np.testing.assert_array_equal(leaves[0], np.isin(marginals.token_ids_RDK[0], [1, 7]))
    assert not leaves[1].any()
