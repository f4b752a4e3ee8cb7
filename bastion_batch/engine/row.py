"""One live or waiting request."""

from collections.abc import Sequence
from typing import Any

from bastion_batch.engine.cache import Slot
from bastion_batch.engine.sampling import Draw
from bastion_batch.engine.text import StopStrings, decode
from bastion_batch.records import Completion, FinishReason, Request, RowFault, StepRecord


class Row:
    """A request with its tokens so far.

    The cache holds `slot.length` of `token_ids`. A decoding row lacks just the last one, which is
    the root of its next tree.
    """

    def __init__(self, request: Request, key: int, end_ids: frozenset[int], tokenizer: Any) -> None:  # noqa: ANN401
        self.request = request
        self.key = key
        self.token_ids: list[int] = [*request.prompt_ids, *request.generated_ids]
        self.slot: Slot | None = None
        self.records: list[StepRecord] = []
        self.num_steps = 0
        self.finish_reason: FinishReason | None = None
        self._end_ids = frozenset() if request.sampling.ignore_eos else end_ids
        self._tokenizer = tokenizer
        self._stops = StopStrings(tokenizer, request.sampling.stop)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Committed tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def context_length(self) -> int:
        """Tokens in the cache."""
        return self.slot.length if self.slot else 0

    @property
    def prefill_end(self) -> int:
        """Tokens that enter the cache as prompt: all, or all but the root of a resumed row."""
        num_generated = len(self.request.generated_ids)
        return self.num_prompt_tokens + max(0, num_generated - 1)

    @property
    def is_prefilling(self) -> bool:
        """Whether the prompt is not yet wholly in the cache."""
        return self.context_length < self.prefill_end

    def max_tree_depth(self, max_context: int) -> int:
        """Deepest node worth verifying: a step commits one token more than it accepts."""
        remaining = self.request.sampling.max_new_tokens - len(self.output_ids)
        room = max_context - len(self.token_ids)
        return max(0, min(remaining, room) - 1)

    def draw(self, path_ids: Sequence[int] = ()) -> Draw:
        """The draw of the token after the row's tokens and a path of nodes."""
        return Draw(
            sampling=self.request.sampling,
            noise_key=self.request.noise_key,
            position=len(self.token_ids) + len(path_ids),
            prompt_ids=self.request.prompt_ids,
            output_ids=[*self.output_ids, *path_ids],
            end_ids=self._end_ids,
        )

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends this row's output."""
        return token_id in self._end_ids

    def commit(self, token_ids: Sequence[int], max_context: int) -> int:
        """Append tokens up to the first stop or limit; returns how many were kept."""
        limit = min(
            self.num_prompt_tokens + self.request.sampling.max_new_tokens, max_context
        )  # fmt: skip
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if token_id in self._end_ids or self._stops.ends(self.output_ids):
                self.finish_reason = "stop"
            elif len(self.token_ids) >= limit:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(token_ids)

    def completion(self, fault: RowFault | None = None) -> Completion:
        """What the row came to."""
        output_ids = self.output_ids
        return Completion(
            row_id=self.request.row_id,
            sample_index=self.request.sample_index,
            output_ids=tuple(output_ids),
            text=self._text(output_ids),
            finish_reason="error" if fault else (self.finish_reason or "length"),
            fault=fault,
            num_prompt_tokens=self.num_prompt_tokens,
            num_steps=self.num_steps,
            records=tuple(self.records),
        )

    def _text(self, output_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        if output_ids and output_ids[-1] in self._end_ids:
            output_ids = output_ids[:-1]
        return self._stops.cut(decode(self._tokenizer, output_ids))
