"""What no tree may hold: banned tokens, end tokens that come too early, what follows an end.

Shape letters: R rows, D draft depth, K ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.engine.drafters import Marginals
from bastion_batch.engine.row import Row


class Allowed(NamedTuple):
    """What may become nodes."""

    marginals: Marginals
    leaves_RDK: NDArray[np.bool_]
    """Marks tokens after which nothing can follow."""


def allowed(
    marginals: Marginals,
    rows: Sequence[Row],
    end_ids: frozenset[int],
    *,
    keep_places: bool = False,
) -> Allowed:
    """The marginals without what the rows' sampling forbids, and their leaves.

    Args:
        marginals: of the rows; left unchanged.
        rows: whose sampling decides.
        end_ids: the target's end-of-sequence tokens.
        keep_places: every candidate stays where it is along K, though what is forbidden may then be
            before what is not.
    """
    log_probs_RDK, ids_RDK = marginals
    ends_RDK = _ends(ids_RDK, rows, end_ids)
    never_RDK = np.zeros(ids_RDK.shape, np.bool_)
    for number, row in enumerate(rows):
        sampling = row.request.sampling
        if sampling.banned_ids:
            never_RDK[number] = np.isin(ids_RDK[number], sampling.banned_ids)
        num_too_early = max(0, sampling.min_new_tokens - len(row.output_ids))
        never_RDK[number, :num_too_early] |= ends_RDK[number, :num_too_early]
    if not never_RDK.any():
        return Allowed(marginals, ends_RDK)
    log_probs_RDK = np.where(never_RDK, -np.inf, log_probs_RDK).astype(np.float32)
    if keep_places:
        return Allowed(Marginals(log_probs_RDK, ids_RDK), ends_RDK)
    order = np.argsort(-log_probs_RDK, -1, kind="stable")
    kept = Marginals(
        np.take_along_axis(log_probs_RDK, order, -1), np.take_along_axis(ids_RDK, order, -1)
    )
    return Allowed(kept, np.take_along_axis(ends_RDK, order, -1))


def _ends(
    ids_RDK: NDArray[np.int64], rows: Sequence[Row], end_ids: frozenset[int]
) -> NDArray[np.bool_]:
    """Marks the tokens that end each row's output; rows with the same ones are marked at once."""
    groups: dict[frozenset[int], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.request.sampling.end_ids(end_ids), []).append(number)
    ends_RDK = np.zeros(ids_RDK.shape, np.bool_)
    for ids, numbers in groups.items():
        if ids:
            ends_RDK[numbers] = np.isin(ids_RDK[numbers], np.array(sorted(ids)))
    return ends_RDK
