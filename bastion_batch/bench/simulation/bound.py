"""The least time in which a job could end, whatever the schedule.

k rows never decode faster together than when they have the workers to themselves, spread best: so
for every k the k longest rows take at least their tokens over that rate. k = 1 is the longest row
alone on the fastest worker; all rows give the job's tokens, and what its prompts cost, over all
full batches. A schedule that may move rows at any moment and for nothing reaches it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.bench.simulation.workers import SimulatedWorker
from bastion_batch.bench.simulation.workload import Workload


class Phase(NamedTuple):
    """From this moment on there are these workers."""

    start_seconds: float
    workers: tuple[SimulatedWorker, ...]


def best_rates(workers: Sequence[SimulatedWorker]) -> NDArray[np.float64]:
    """Entry k - 1: the most tokens per second that k rows decode at, up to all slots."""
    gains = [np.diff([worker.rate(b) for b in range(worker.max_batch + 1)]) for worker in workers]
    return np.cumsum(-np.sort(-np.concatenate(gains)))


def lower_bound(workload: Workload, phases: Sequence[Phase]) -> float:
    """Seconds that any schedule takes; phases are in order of time and the first starts at 0."""
    longest_K = np.sort(workload.lengths_R)[::-1]
    num_slots = max(len(best_rates(phase.workers)) for phase in phases)
    needed_K = np.cumsum(longest_K[:num_slots], dtype=np.float64)
    total = float(longest_K.sum(dtype=np.float64)) + _prefill_tokens(workload, phases)
    needed_K = np.append(needed_K, total)
    left_K = needed_K
    for number, phase in enumerate(phases):
        rates = best_rates(phase.workers)
        rates_K = rates[np.minimum(np.arange(len(needed_K)), len(rates) - 1)]
        rates_K[-1] = rates[-1]
        if number + 1 < len(phases):
            seconds = phases[number + 1].start_seconds - phase.start_seconds
            if (left_K > rates_K * seconds).any():
                left_K = np.maximum(left_K - rates_K * seconds, 0.0)
                continue
        return phase.start_seconds + float((left_K / rates_K).max())
    raise AssertionError("the last phase has no end")


def decode_bound(workload: Workload, workers: Sequence[SimulatedWorker]) -> float:
    """The simpler bound of all tokens over all full batches, and of the longest row alone."""
    total = float(workload.lengths_R.sum(dtype=np.float64))
    fastest = max(worker.rate(1) for worker in workers)
    full = sum(worker.full_rate for worker in workers)
    return max(total / full, float(workload.lengths_R.max()) / fastest)


def _prefill_tokens(workload: Workload, phases: Sequence[Phase]) -> float:
    """What the prompts cost, in output tokens that are not decoded meanwhile, at the least."""
    cheapest = min(w.full_rate / w.prefill_rate for phase in phases for w in phase.workers)
    return float(workload.prompt_tokens_R.sum(dtype=np.float64)) * cheapest
