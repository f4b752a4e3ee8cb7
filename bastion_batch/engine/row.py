"""One live or waiting request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bastion_batch.engine.cache import Slot
from bastion_batch.engine.history import History
from bastion_batch.engine.sampling import Draw
from bastion_batch.engine.text import StopStrings, decode
from bastion_batch.records import (
    Completion,
    Exported,
    FinishReason,
    Request,
    RowFault,
    StepRecord,
)


class Row:
    """A request with its tokens so far.

    The cache holds `slot.length` of `token_ids`. A decoding row lacks just the last one, which is
    the root of its next tree. A row without a slot waits, with whatever it has generated so far.
    """

    def __init__(self, request: Request, key: int, end_ids: frozenset[int], tokenizer: Any) -> None:  # noqa: ANN401
        self.request = request
        self.key = key
        self.token_ids: list[int] = list(request.prompt_ids)
        """Prompt and output."""
        self.output_ids: list[int] = []
        """Committed tokens; those of the request are committed by whoever takes the row in."""
        self.slot: Slot | None = None
        self.records: list[StepRecord] = []
        self.num_steps = 0
        self.finish_reason: FinishReason | None = None
        self.fault: RowFault | None = None
        self._end_ids = request.sampling.end_ids(end_ids)
        self._history = History(request.prompt_ids, self.output_ids)
        self._tokenizer = tokenizer
        self._stops = StopStrings(tokenizer, request.sampling.stop)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.request.prompt_ids)

    @property
    def context_length(self) -> int:
        """Tokens in the cache."""
        return self.slot.length if self.slot else 0

    @property
    def prefill_end(self) -> int:
        """Tokens that enter the cache as prompt: all, or all but the root of a row with output."""
        return len(self.token_ids) - bool(self.output_ids)

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
        """The draw of the token after the row's tokens and a path of nodes, until one is committed."""
        return Draw(
            sampling=self.request.sampling,
            noise_key=self.request.noise_key,
            position=len(self.token_ids) + len(path_ids),
            history=self._history,
            path_ids=path_ids,
            end_ids=self._end_ids,
        )

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends this row's output."""
        return token_id in self._end_ids

    def commit(self, token_ids: Sequence[int], max_context: int) -> int:
        """Append tokens up to the first stop or limit; returns how many were kept."""
        limit = min(self.request.sampling.max_new_tokens, max_context - self.num_prompt_tokens)
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            self.output_ids.append(token_id)
            if token_id in self._end_ids or self._stops.ends(self.output_ids):
                self.finish_reason = "stop"
            elif len(self.output_ids) >= limit:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(token_ids)

    def fail(self, fault: RowFault) -> None:
        """End the row with a fault; what it has generated stays in its completion."""
        self.finish_reason, self.fault = "error", fault

    def exported(self) -> Exported:
        """What another engine needs to go on with the row."""
        request = replace(self.request, generated_ids=tuple(self.output_ids))
        return Exported(request, tuple(self.records), self.num_steps)

    def completion(self) -> Completion:
        """What the row came to."""
        assert self.finish_reason is not None
        return Completion(
            row_id=self.request.row_id,
            sample_index=self.request.sample_index,
            output_ids=tuple(self.output_ids),
            text=self._text(self.output_ids),
            finish_reason=self.finish_reason,
            fault=self.fault,
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
