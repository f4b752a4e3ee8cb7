"""From token ids to text, and the stop strings in it."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Watches one output for its stop strings, token by token.

    Only a tail of the output is decoded: enough tokens that a stop string cannot begin earlier
    and end in the newest token.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self._stop = stop
        self._tail_tokens = 8 + max((len(s.encode()) for s in stop), default=0)

    def ends(self, output_ids: Sequence[int]) -> bool:
        """Whether the newest token completes a stop string."""
        if not self._stop:
            return False
        tail = decode(self._tokenizer, output_ids[-self._tail_tokens :])
        return any(stop in tail for stop in self._stop)

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        found = [text.find(stop) for stop in self._stop]
        return text[: min((at for at in found if at >= 0), default=len(text))]


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:  # noqa: ANN401
    """The text of token ids, special tokens left out."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True)
