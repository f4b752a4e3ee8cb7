"""The loops of `row_attention`: scores, softmax and weighted values of some queries and keys of a row.

Arrays hold bfloat16 as its bits or float32; arithmetic is float32. The work of a layer is a job of
units, an array of addresses and sizes, which any number of threads work off together. Where the
keys of a row are in several units, each leaves its part of the softmax, and whoever ends the last
of them puts the parts together.

Shape letters: S tokens of the pass, H query heads, G key-value heads, D head size, L layers, N
entries of a cache's group, E its lines (an entry's keys and values, head by head), R rows, U units,
Q queries, K keys, T tokens of a row, P queries of all parts.
"""

from functools import cache

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from bastion_batch.core.compiled import compiled, compiled_address
from bastion_batch.engine.exponentials import exponential, exponentials, largest_of
from bastion_batch.engine.floats import narrow, widen
from bastion_batch.engine.team import array_at, pointer_to, prefetch, run_by_team, take_next
from bastion_batch.engine.vectors import (
    LANES,
    NUM_KEYS,
    NUM_QUERIES,
    add_weighted_four,
    lane_of,
    score_block,
)

_FAST = {"reassoc", "contract", "nsz"}  # sums may be reordered; infinities and NaN stay
_AHEAD = 16
"""How many keys ahead memory is fetched: a processor does not do it beyond a page."""
_FETCHED = 8
"""Of how many keys the values are fetched beside the softmax of a query, which needs no memory."""
_ROW_FIELDS = _UNIT_FIELDS = 8
_JOB_FIELDS = 20


@compiled(fastmath=_FAST, error_model="numpy")
def _softmax(scores_K, num_keys, seen_T):  # noqa: ANN001, ANN202
    """In place, up to its sum. The last T keys count where `seen_T` says so, what follows does not.

    Returns:
        the largest score and the sum.
    """
    first = num_keys - len(seen_T)
    for t in range(len(seen_T)):
        if not seen_T[t]:
            scores_K[first + t] = np.float32(-1e30)
    scores_K[num_keys:] = np.float32(-1e30)
    place, num_vectors = scores_K.ctypes.data, len(scores_K) // LANES
    most = largest_of(place, num_vectors)
    return most, exponentials(place, num_vectors, most)


@compiled()
def _zeros_in_lines(size_Q, size_D):  # noqa: ANN001, ANN202
    """An array that begins where a line of the processor's cache does: no vector is in two."""
    spare = np.zeros(size_Q * size_D + 16, np.float32)
    first = (-spare.ctypes.data % 64) // 4
    return spare[first : first + size_Q * size_D].reshape((size_Q, size_D))


@compiled(fastmath=_FAST, error_model="numpy")
def _queries(heads_SHD, first_token, q_head, num_tokens, group, out_QD):  # noqa: ANN001, ANN202
    """The queries that share a key-value head, scaled, token by token."""
    size_D = heads_SHD.shape[2]
    scale = np.float32(1 / np.sqrt(size_D))
    for i in range(num_tokens * group):
        query_D = heads_SHD[first_token + i // group, q_head + i % group]
        for d in range(size_D):
            lane = lane_of(np.uint64(d), np.uint64(size_D), query_D[d])
            out_QD[np.uint64(i), lane] = widen(query_D[d]) * scale


@compiled(error_model="numpy")
def _fetch(first, entry_bytes, num_entries, size):  # noqa: ANN001, ANN202
    """Have the first `size` bytes of entries that lie `entry_bytes` apart brought near."""
    for entry in range(first, first + num_entries * entry_bytes, entry_bytes):
        for place in range(entry, entry + size, 64):
            prefetch(place)


@compiled(fastmath=_FAST, error_model="numpy")
def _scores(q_QD, used, entries_ED, line, step, num_heads, num_keys, scores_QK):  # noqa: ANN001, ANN202
    """Of every head's `used` queries with its keys, a `step` of lines apart, in their order.

    What comes soon is fetched meanwhile: keys, in the end the first values.
    """
    size_D = entries_ED.shape[1]
    each = len(q_QD) // num_heads
    line_bytes = size_D * entries_ED.itemsize
    key = entries_ED.ctypes.data + line * line_bytes
    queries, query_bytes = q_QD.ctypes.data, 4 * size_D
    scores, score_bytes = scores_QK.ctypes.data, 4 * scores_QK.shape[1]
    key_bytes = step * line_bytes
    first_value = key + step // 2 * line_bytes
    for k in range(0, num_keys, NUM_KEYS):
        coming = key + _AHEAD * key_bytes
        if k + _AHEAD >= num_keys:
            coming = first_value + (k + _AHEAD - num_keys) * key_bytes
        _fetch(coming, key_bytes, NUM_KEYS, num_heads * line_bytes)
        for head in range(num_heads):
            for q in range(head * each, (head + 1) * each, NUM_QUERIES):
                score_block(
                    queries + q * query_bytes,
                    query_bytes,
                    min(head * each + used - q, NUM_QUERIES),
                    key + head * line_bytes,
                    key_bytes,
                    num_keys - k,
                    size_D,
                    scores + q * score_bytes + 4 * k,
                    score_bytes,
                    entries_ED[0, 0],
                )
        key += NUM_KEYS * key_bytes


@compiled(fastmath=_FAST, error_model="numpy")
def _weighted_values(weights_QK, used, entries_ED, line, step, num_heads, num_keys, sums_QD):  # noqa: ANN001, ANN202
    """The weighted sums of the values of every head, for its `used` queries."""
    size_D = entries_ED.shape[1]
    each = len(sums_QD) // num_heads
    line_bytes, weight_bytes = size_D * entries_ED.itemsize, 4 * weights_QK.shape[1]
    value = entries_ED.ctypes.data + line * line_bytes
    for q in range(0, num_heads * each, NUM_QUERIES):
        is_first = q % each == 0  # the others find what it fetched
        add_weighted_four(
            weights_QK.ctypes.data + weight_bytes * q,
            weight_bytes,
            min(used - q % each, NUM_QUERIES),
            value + q // each * line_bytes,
            step * line_bytes,
            _AHEAD * step * line_bytes if is_first else 0,
            num_keys,
            sums_QD.ctypes.data + 4 * size_D * q,
            size_D,
            entries_ED[0, 0],
        )


@compiled(fastmath=_FAST, error_model="numpy", nogil=True)
def _attend_unit(heads_SHD, entries_ED, row, unit, visible, num_q_heads, sums_PD, softmax_P2):  # noqa: ANN001, ANN202
    """Scores of all the unit's queries, softmax, weighted values: its part of what its row gets.

    Every key and value is read once, in the order in which the entries lie. The queries of a
    key-value head lie together, as many as a multiple of `NUM_QUERIES`.
    """
    first_token, size, first_entry, context, mask, first_part, _, _ = row
    _, part, first_key, last_key, first_head, last_head, start, stop = unit
    size_D, num_kv_heads = heads_SHD.shape[2], (heads_SHD.shape[1] - num_q_heads) // 2
    group = num_q_heads // num_kv_heads
    num_heads, num_keys = last_head - first_head, last_key - first_key
    used = (stop - start) * group
    each = (used + NUM_QUERIES - 1) // NUM_QUERIES * NUM_QUERIES
    q_QD = _zeros_in_lines(num_heads * each, size_D)
    for head in range(num_heads):
        q_head = (first_head + head) * group
        queries = q_QD[head * each : head * each + used]
        _queries(heads_SHD, first_token + start, q_head, stop - start, group, queries)
    in_vectors = (num_keys + LANES - 1) // LANES * LANES
    scores_QK = np.empty((num_heads * each, in_vectors), np.float32)
    step = 2 * num_kv_heads
    line = (first_entry + first_key) * step + first_head
    _scores(q_QD, used, entries_ED, line, step, num_heads, num_keys, scores_QK)
    first_own = max(first_key, context)
    num_own = max(last_key - first_own, 0)
    first_place = first_part + part * size * num_q_heads
    entry_bytes, line_bytes = step * size_D * entries_ED.itemsize, size_D * entries_ED.itemsize
    values, num_fetched = entries_ED.ctypes.data + (line + num_kv_heads) * line_bytes, _AHEAD
    for head in range(num_heads):
        for i in range(used):
            num_more = max(min(_FETCHED, num_keys - num_fetched), 0)
            first = values + num_fetched * entry_bytes
            _fetch(first, entry_bytes, num_more, num_heads * line_bytes)
            num_fetched += num_more
            q, token = head * each + i, start + i // group
            seen_T = visible[mask + token * size + first_own - context :][:num_own]
            most, total = _softmax(scores_QK[q], num_keys, seen_T)
            place = first_place + token * num_q_heads + (first_head + head) * group + i % group
            softmax_P2[place, 0], softmax_P2[place, 1] = most, total
    sums_QD = q_QD  # not needed any more
    _weighted_values(
        scores_QK, used, entries_ED, line + num_kv_heads, step, num_heads, num_keys, sums_QD
    )
    for head in range(num_heads):
        for i in range(used):
            token, q_head = start + i // group, (first_head + head) * group + i % group
            sums_PD[first_place + token * num_q_heads + q_head] = sums_QD[head * each + i]


@compiled(fastmath=_FAST, error_model="numpy")
def _put_together(row, sums_PD, softmax_P2, like, out_SHD):  # noqa: ANN001, ANN202
    """The outputs of a row of which all parts are there: weighted means."""
    first_token, size, _, _, _, first_part, num_parts, _ = row
    num_q_heads = out_SHD.shape[1]
    num_queries = size * num_q_heads
    sum_D = np.empty(sums_PD.shape[1], np.float32)
    for q in range(num_queries):
        place = first_part + q
        most = softmax_P2[place, 0]
        for part in range(1, num_parts):
            most = max(most, softmax_P2[place + part * num_queries, 0])
        total = np.float32(0)
        sum_D[:] = 0
        for part in range(num_parts):
            p = place + part * num_queries
            weight = exponential(softmax_P2[p, 0] - most)
            total += weight * softmax_P2[p, 1]
            for d in range(len(sum_D)):
                sum_D[d] += weight * sums_PD[p, d]
        out_D = out_SHD[first_token + q // num_q_heads, q % num_q_heads]
        for d in range(len(sum_D)):
            lane = lane_of(np.uint64(d), np.uint64(len(sum_D)), like)
            out_D[d] = narrow(sum_D[lane] / total, like)


@compiled(fastmath=_FAST, error_model="numpy")
def _work_off(job, like):  # noqa: ANN001, ANN202
    """Units of a job one after the other until none is left; any number of threads may do so."""
    num_tokens, num_heads, size_D, num_q_heads = job[3], job[4], job[5], job[15]
    heads_SHD = array_at(job[2], (num_tokens, num_heads, size_D), like)
    entries_ED = array_at(job[6], (job[7], size_D), like)
    rows_R = array_at(job[8], (job[9], _ROW_FIELDS), job[9])
    visible_V = array_at(job[10], (job[11],), np.uint8(0))
    units_U = array_at(job[12], (job[13], _UNIT_FIELDS), job[13])
    out_SHD = array_at(job[14], (num_tokens, num_q_heads, size_D), like)
    sums_PD = array_at(job[16], (job[17], size_D), np.float32(0))
    softmax_P2 = array_at(job[18], (job[17], 2), np.float32(0))
    while True:
        u = take_next(job.ctypes.data)
        if u >= len(units_U):
            return
        unit, row = units_U[u], rows_R[units_U[u, 0]]
        _attend_unit(heads_SHD, entries_ED, row, unit, visible_V, num_q_heads, sums_PD, softmax_P2)
        num_done, num_units = take_next(job[19] + 8 * unit[0]) + 1, row[7]
        if num_done == num_units:
            _put_together(row, sums_PD, softmax_P2, like, out_SHD)


def _work(job):  # noqa: ANN001, ANN202
    """What every thread of the team does, given the address of the job."""
    job = carray(pointer_to(job, job), (_JOB_FIELDS,))
    if job[1] == 2:
        _work_off(job, np.uint16(0))
    else:
        _work_off(job, np.float32(0))


@compiled(error_model="numpy")
def _store(heads_SHD, entries_NKGD, rows_R, num_q_heads):  # noqa: ANN001, ANN202
    """The rows' keys and values, after their contexts."""
    num_kv_heads, size_D = entries_NKGD.shape[2:]
    for row in range(len(rows_R)):
        first_token, size, first_entry, context = rows_R[row, :4]
        for t in range(size):
            entry_KGD = entries_NKGD[first_entry + context + t]
            for head in range(2 * num_kv_heads):
                for d in range(size_D):
                    value = heads_SHD[first_token + t, num_q_heads + head, d]
                    entry_KGD[head // num_kv_heads, head % num_kv_heads, d] = value


@cache
def work_address() -> int:
    """Where what every thread of a team does is."""
    return compiled_address(types.void(types.int64), _work)


def new_job(
    rows_R: NDArray[np.int64],
    visible_V: NDArray[np.uint8],
    units_U: NDArray[np.int64],
    sums_PD: NDArray[np.float32],
    softmax_P2: NDArray[np.float32],
    done_R: NDArray[np.int64],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    num_entries: int,
    word_bytes: int,
) -> NDArray[np.int64]:
    """The job of every layer of a pass; where a layer's own numbers lie, `attend` adds.

    It holds addresses only: whoever keeps it keeps the arrays.
    """
    job = np.zeros(_JOB_FIELDS, np.int64)
    job[1] = word_bytes
    job[4], job[5] = num_q_heads + 2 * num_kv_heads, sums_PD.shape[1]
    job[7] = num_entries * 2 * num_kv_heads
    job[8], job[9] = rows_R.ctypes.data, len(rows_R)
    job[10], job[11] = visible_V.ctypes.data, len(visible_V)
    job[12], job[13] = units_U.ctypes.data, len(units_U)
    job[15] = num_q_heads
    job[16], job[17], job[18] = sums_PD.ctypes.data, len(sums_PD), softmax_P2.ctypes.data
    job[19] = done_R.ctypes.data
    return job


@compiled()
def attend(job, like, heads, num_tokens, entries, out, num_threads, starter, work):  # noqa: ANN001, ANN201
    """Store the rows' keys and values, then have the team work off the units.

    Addresses and sizes instead of arrays: checking a dozen of them at every layer's call would take
    longer than a small layer does.

    Args:
        job: of `new_job`.
        like: a number of the kind that is stored.
        heads: address of the queries, keys and values of the pass's tokens.
        num_tokens: of the pass.
        entries: address of the cache's entries of the layer.
        out: address of the outputs.
        num_threads: of the team, with its `starter`.
        starter: see there.
        work: `work_address()`.
    """
    num_heads, size_D, num_q_heads = job[4], job[5], job[15]
    num_kv_heads = (num_heads - num_q_heads) // 2
    heads_SHD = array_at(heads, (num_tokens, num_heads, size_D), like)
    shape = (job[7] // (2 * num_kv_heads), 2, num_kv_heads, size_D)
    rows_R = array_at(job[8], (job[9], _ROW_FIELDS), job[9])
    _store(heads_SHD, array_at(entries, shape, like), rows_R, num_q_heads)
    array_at(job[19], (job[9],), job[9])[:] = 0
    job[0], job[2], job[3], job[6], job[14] = 0, heads, num_tokens, entries, out
    if num_threads > 1:
        run_by_team(starter, work, job.ctypes.data, num_threads)
    else:
        _work_off(job, like)
