"""What one schedule is made of, drawn at random."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random

from bastion_batch.io.units import row_id

NUM_MODES = 4
"""Seeds of one mode are so far apart."""


class Mode(Enum):
    """What a schedule is about."""

    HARSH = 0
    """All that can go wrong does so often."""
    MOVING = 1
    """Rows are decoded away from slow owners, and these are killed."""
    MIXED = 2

    @classmethod
    def of(cls, seed: int) -> "Mode":
        """The mode of a seed; half of them are mixed."""
        return cls(min(seed % NUM_MODES, cls.MIXED.value))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Times are in seconds, rates are probabilities."""

    scale: float
    """Of the times that are no promise of ours: how slow engines and accidents are."""
    conditional: bool
    """Whether storage creates a name atomically; else its last writer wins."""
    paces: Mapping[str, float]
    """Seconds of a step, by worker."""
    max_batch: int
    harm: Mapping[str, str]
    """What rows do to their engines."""
    delay: float
    """Of a message, on average."""
    loss_rate: float
    """Of messages between workers."""
    repeat_rate: float
    """How often one of them arrives a second time, later."""
    pause_rate: float
    """How often a process is held up before it calls storage."""
    pause: float
    """How long, on average."""
    hold_rate: float
    """How often it is held up for long before it creates a data file."""
    forsake_rate: float
    """How often such a process is given up meanwhile."""
    orphan_rate: float
    """How often its driver is killed meanwhile."""
    fault_rate: float
    """How often storage fails at a write."""
    num_faults: int
    """No more faults of storage than these."""
    num_tries: int
    """Of a commit."""
    stale: bool
    """Whether listings may be old."""
    num_accidents: int
    num_moves: int
    """Rows that are sent to another engine."""
    num_doubts: int
    """Owners that their balance believes to be stuck, and workers that it believes to be sick."""
    kill_owners_at: int | None
    """Owners are killed while others have rows of theirs, and this many, up to two, of those
    that were away have been acknowledged."""


def draw(random: Random, mode: Mode) -> Settings:
    """The settings of one schedule."""
    harsh, moving = mode is Mode.HARSH, mode is Mode.MOVING
    scale = 12.0 if moving else random.choice([1.0, 1.0, 12.0])
    pace = scale * (0.3 if moving else random.choice([0.03, 0.1, 0.3]))
    num_workers = random.randint(1 if mode is Mode.MIXED else 2, 4)
    return Settings(
        scale=scale,
        conditional=random.random() < 0.6,
        paces={f"w{i}": pace * random.uniform(0.2, 5.0) for i in range(num_workers)},
        max_batch=random.choice([1, 2] if moving else [1, 2, 4]),
        harm={row_id(0, 1): "raise"} if random.random() < 0.15 else {},
        delay=random.choice([0.001, 0.05, 0.5]),
        loss_rate=random.choice([0.0, 0.0, 0.1]),
        repeat_rate=random.choice([0.0, 0.0, 0.2]),
        pause_rate=0.5 if harsh else random.choice([0.0, 0.2]),
        pause=random.choice([0.05, 1.0]),
        hold_rate=0.5 if harsh else random.choice([0.0, 0.1]),
        forsake_rate=0.5,
        orphan_rate=0.2,
        fault_rate=0.15 if harsh else random.choice([0.0, 0.02, 0.08]),
        num_faults=12 if harsh else random.randint(0, 10),
        num_tries=random.choice([1, 2, 4]),
        stale=random.random() < 0.3,
        num_accidents=6 if harsh else random.choice([0, 1, 3]),
        num_moves=60 if moving else random.choice([0, 5, 40]),
        num_doubts=random.choice([0, 3, 12]),
        kill_owners_at=random.randint(0, 2) if moving else None,
    )
