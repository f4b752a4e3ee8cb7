"""Time and tokens of an engine: the stages of a step, and the measured baseline."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from bastion_batch.records import EngineTotals

STAGES = ("prefill", "draft", "build", "verify", "commit", "other")


class StageClock:
    """Times the stages of one step; they sum to the step."""

    def __init__(self, late_seconds: float = 0.0) -> None:
        """Start a step that also answers for what came after the last one's `finish`."""
        self._start = time.perf_counter() - late_seconds
        self._finished = self._start
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @property
    def late_seconds(self) -> float:
        """Time since `finish`: the books of the step, which the next one pays for."""
        return time.perf_counter() - self._finished

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of the step; a stage may come in several parts."""
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    def seconds(self, stage: str) -> float:
        """Time of a stage so far."""
        return self._seconds[stage]

    def finish(self, prefill_share: float) -> dict[str, float]:
        """Seconds of each stage and of the ``step``.

        Args:
            prefill_share: the part of the verification pass that is prompt; prompts share it.
        """
        seconds = self._seconds
        self._finished = time.perf_counter()
        step = self._finished - self._start
        seconds["prefill"] = prefill_share * seconds["verify"]
        seconds["verify"] -= seconds["prefill"]
        seconds["other"] = max(0.0, step - sum(seconds.values()))
        return {**seconds, "step": step}


class BaselineBursts:
    """Measures plain decoding inside a drafted run: every so often a few plain steps.

    The tokens of a burst are kept, as they are the same tokens; only their speed differs. Each
    plain step is compared with the recent steps of as many rows, so that like is compared with
    like whatever the batch does later.
    """

    PERIOD = 100
    """Steps from one burst to the next."""
    LENGTH = 2
    """Plain steps of a burst."""
    MIN_PAIRED = 10
    """Recent steps of the same batch size that a comparison needs."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=self.PERIOD)
        self._until_burst = self.PERIOD - self.LENGTH
        self._left_of_burst = 0

    def begin_step(self, num_rows: int, *, has_prompts: bool) -> bool:
        """Whether the coming step is to be a plain one."""
        if not self._enabled or has_prompts or not num_rows:
            return False
        if not self._left_of_burst:
            self._until_burst -= 1
            if self._until_burst >= 0 or len(self._paired(num_rows)) < self.MIN_PAIRED:
                return False
            self._until_burst = self.PERIOD - self.LENGTH
            self._left_of_burst = self.LENGTH
        self._left_of_burst -= 1
        return True

    def end_step(
        self, num_rows: int, num_tokens: int, seconds: float, *, is_burst: bool
    ) -> EngineTotals:
        """Take note of a step without prompts; returns what a burst's step adds to the totals."""
        if not is_burst:
            self._recent.append((num_rows, num_tokens, seconds))
            return EngineTotals()
        paired = self._paired(num_rows)
        tokens = sum(step[1] for step in paired)
        return EngineTotals(
            plain_steps=1,
            plain_tokens=tokens,
            plain_seconds=tokens * seconds / num_tokens,
            paired_tokens=tokens,
            paired_seconds=sum(step[2] for step in paired),
        )

    def _paired(self, num_rows: int) -> list[tuple[int, int, float]]:
        return [step for step in self._recent if step[0] == num_rows]
