"""What drafted steps take beyond plain ones besides the draft pass itself."""


class DraftOverheads:
    """Running means of the seconds that catching up and growing trees take, by batch size.

    One per power of two of the batch size. A size that is new takes the nearest known one's.
    """

    RATE = 0.1

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def seconds(self, num_rows: int) -> float:
        """Predicted for a step of so many rows; nothing before anything was seen."""
        if not self._seconds:
            return 0.0
        size = num_rows.bit_length()
        return self._seconds[min(self._seconds, key=lambda known: abs(known - size))]

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a drafted step."""
        size = num_rows.bit_length()
        known = self._seconds.setdefault(size, seconds)
        self._seconds[size] += self.RATE * (seconds - known)
