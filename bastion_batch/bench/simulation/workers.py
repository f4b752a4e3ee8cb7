"""Simulated workers: what a device decodes per second, at which batch, and what an hour of it costs.

The reference cluster is two fast, two middling and four slow GPUs. Labels promise nothing: each
worker's true rate lies up to 20 % off that of its kind.
"""

import random
from dataclasses import dataclass

PREFILL_OVER_SATURATED = 8.0
"""Prompt tokens per second over saturated output tokens per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """One worker: `saturated * b / (b + half)` output tokens per second at batch b."""

    name: str
    device: str
    saturated: float
    half: float
    max_batch: int
    price_per_hour: float

    def rate(self, batch: int) -> float:
        """Output tokens per second of the whole batch."""
        return self.saturated * batch / (batch + self.half)

    @property
    def full_rate(self) -> float:
        """Output tokens per second with every slot taken."""
        return self.rate(self.max_batch)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; nothing is decoded meanwhile."""
        return PREFILL_OVER_SATURATED * self.saturated


H100 = SimulatedWorker(
    name="h100", device="H100", saturated=6560, half=40, max_batch=256, price_per_hour=2.99
)
A100 = SimulatedWorker(
    name="a100", device="A100", saturated=3900, half=32, max_batch=192, price_per_hour=1.64
)
A6000 = SimulatedWorker(
    name="a6000", device="A6000", saturated=2090, half=24, max_batch=96, price_per_hour=0.76
)
REFERENCE_KINDS = (H100, H100, A100, A100, A6000, A6000, A6000, A6000)


def reference_workers(
    seed: int, num_workers: int = len(REFERENCE_KINDS), spread: float = 0.2
) -> tuple[SimulatedWorker, ...]:
    """Workers of the reference kinds by turns, each with a rate of its own within the spread."""
    generator = random.Random(seed)
    kinds = [REFERENCE_KINDS[i % len(REFERENCE_KINDS)] for i in range(num_workers)]
    return tuple(
        SimulatedWorker(
            name=f"w{number}",
            device=kind.device,
            saturated=kind.saturated * generator.uniform(1 - spread, 1 + spread),
            half=kind.half,
            max_batch=kind.max_batch,
            price_per_hour=kind.price_per_hour,
        )
        for number, kind in enumerate(kinds)
    )
