"""When a job will be done, its tail included."""

from collections.abc import Callable, Iterable

from bastion_batch.core.orders import Eta, Running
from bastion_batch.core.roster import WorkerState

SAMPLED_ROWS = 16
"""Running rows of a worker that stand for all of them."""


def forecast(
    workers: Iterable[WorkerState], waiting_tokens: float, tokens_left: Callable[[Running], float]
) -> Eta | None:
    """When all will be done, or None before a rate is known.

    The job ends when the workers have been through all tokens at full speed, or when the row that
    takes longest where it runs has ended, if that is later.

    Args:
        workers: the live ones.
        waiting_tokens: expected of rows that have not started.
        tokens_left: expected of a running row.
    """
    rate = running_tokens = longest_seconds = 0.0
    for state in workers:
        if state.curve is None:
            continue
        rate += state.curve.total(state.max_batch)
        rows = state.status.running
        if not rows:
            continue
        sample = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
        running_tokens += sum(map(tokens_left, sample)) / len(sample) * len(rows)
        oldest = max(rows, key=lambda row: row.num_tokens)
        row_rate = state.curve.per_row(min(len(rows), state.max_batch))
        longest_seconds = max(longest_seconds, tokens_left(oldest) / row_rate)
    if not rate:
        return None
    seconds = max((waiting_tokens + running_tokens) / rate, longest_seconds)
    return Eta(seconds, max(seconds - waiting_tokens / rate, 0.0))
