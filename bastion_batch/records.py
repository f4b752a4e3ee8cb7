"""What crosses the package's borders: requests in, completions and step records out.

Plain, immutable values without heavy imports: the engine, the files and the cluster all use them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "error"]
Method = Literal["ar", "dflash", "ddtree", "bastion"]

RowKey = tuple[str, int]
"""`row_id` and `sample_index`: what one completion is of."""


class RowFault(NamedTuple):
    """Why a row cannot be answered: reproducible and the row's own, so it is terminal at once."""

    kind: str
    """Stable, machine-readable: ``null_prompt``, ``prompt_too_long``, ``invalid_json``, ..."""
    message: str
    """Names the value and the limit, never the prompt's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    """Keep only the k most probable tokens."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Divides (positive) or multiplies (negative) the logits of tokens in prompt and output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it occurs in the output so far."""
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    """No stop token may be emitted before this many tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit; `tuple(mapping.items())` of a mapping."""
    banned_ids: tuple[int, ...] = ()
    """Tokens that are never chosen, whatever their bias."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the target's own; also with `ignore_eos`."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it."""
    ignore_eos: bool = False
    """Go on after the target's end-of-sequence tokens."""

    def end_ids(self, target_end_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an output, of a target with these end-of-sequence tokens."""
        return (frozenset() if self.ignore_eos else target_end_ids).union(self.stop_token_ids)

    def fault(self, vocab_size: int, target_end_ids: frozenset[int]) -> str | None:
        """Why such a target can choose no token with these parameters, or None if it can."""
        named = {
            "logit_bias": [token for token, _ in self.logit_bias],
            "banned_ids": self.banned_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            beyond = [token for token in ids if not 0 <= token < vocab_size]
            if beyond:
                return f"{name} names token {beyond[0]}; the target's vocabulary has {vocab_size}"
        held_back = self.end_ids(target_end_ids) if self.min_new_tokens else frozenset()
        num_removed = len(held_back.union(self.banned_ids))
        if num_removed >= vocab_size:
            return (
                f"banned_ids and the end tokens that min_new_tokens holds back are {num_removed} "
                f"tokens; the target's vocabulary has {vocab_size}, and one must be left"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to generate: one sample of one row."""

    row_id: str
    sample_index: int = 0
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    noise_key: int = 0
    """64-bit key of the row's sampling noise: see `bastion_batch.core.noise.row_key`."""
    generated_ids: tuple[int, ...] = ()
    """Output tokens already decided elsewhere: the row goes on after them."""


class StepTiming(NamedTuple):
    """One engine step, shared by all rows that were live in it. Times in seconds.

    The stages sum to ``step_seconds``: draft ends with top-k log-probabilities on the host,
    verify with all needed logits ready, and what belongs to no stage is ``other_seconds``.
    """

    step: int
    method: Method
    """What the step did: ``ar`` when the controller chose not to draft."""
    batch_size: int
    """Live rows, those still in prefill included."""
    budget_nodes: int
    """Drafted nodes verified in this step, over all rows, roots not counted."""
    prefill_tokens: int
    predicted_verify_seconds: float
    """Of the whole pass, prompts included: what `verify_seconds + prefill_seconds` came to."""
    predicted_step_seconds: float
    prefill_seconds: float
    draft_seconds: float
    build_seconds: float
    verify_seconds: float
    commit_seconds: float
    other_seconds: float
    step_seconds: float


class StepRecord(NamedTuple):
    """What one step did for one live row."""

    timing: StepTiming
    method: str
    """The step's method, or ``prefill`` while the row's prompt enters the cache."""
    context_length: int
    """Tokens in the cache before the step."""
    num_nodes: int
    tree_depth: int
    top1_depth: int
    """Depth to which the tree follows the drafter's most probable token at every position."""
    num_accepted: int
    """Drafted tokens accepted, the bonus token not counted, before any cut at a stop or limit."""
    num_committed: int
    """Tokens kept, after the cut at a stop or limit."""
    expected_tokens: float
    expected_tokens_raw: float
    """The same from the drafter's uncalibrated probabilities."""


class Exported(NamedTuple):
    """A half-generated row on its way to another engine, which ends it with the same text."""

    request: Request
    """With every token committed so far in ``generated_ids``."""
    records: tuple[StepRecord, ...] = ()
    """Of the steps so far, so that the books of the completion add up."""
    num_steps: int = 0
    """Decode steps so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The engine's answer to one request."""

    row_id: str
    sample_index: int
    output_ids: tuple[int, ...]
    """Every committed token, a stop token included."""
    text: str
    """The output without the stop token or stop string; empty when the engine has no tokenizer."""
    finish_reason: FinishReason
    fault: RowFault | None = None
    """Set exactly when ``finish_reason`` is ``error``."""
    num_prompt_tokens: int
    num_steps: int
    """Decode steps, prefill not counted."""
    records: tuple[StepRecord, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        """Committed tokens, a stop token included."""
        return len(self.output_ids)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens committed in decode steps per decode step, or None without any."""
        decoded = sum(r.num_committed for r in self.records if r.method != "prefill")
        return decoded / self.num_steps if self.num_steps else None


class End(NamedTuple):
    """An engine that ended while a row was in it."""

    worker: str
    attempt: int


class Stretch(NamedTuple):
    """Consecutive step records of one row that one worker made."""

    worker: str
    attempt: int
    device: str
    num_records: int
    dtype: str | None = None
    """None in what an earlier version has journaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one sample of a row came to, wherever it was decoded."""

    completion: Completion
    stretches: tuple[Stretch, ...]
    """They cover the completion's records in order; the last is of the worker that ended it."""
    num_migrations: int = 0
    """How often the row went on in another engine."""

    @property
    def key(self) -> RowKey:
        """Whose outcome it is."""
        return self.completion.row_id, self.completion.sample_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """One sample of a row that has not ended, between two engines or before the first.

    Self-contained: any engine of the job's target ends it with the same text.
    """

    exported: Exported
    stretches: tuple[Stretch, ...] = ()
    """They cover the records so far, in order."""
    num_migrations: int = 0

    @property
    def key(self) -> RowKey:
        """Whose prefix it is."""
        return self.exported.request.row_id, self.exported.request.sample_index

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.exported.request.generated_ids)


class EngineTotals(NamedTuple):
    """Running sums of an engine, or what one step adds to them."""

    num_steps: int = 0
    num_row_steps: int = 0
    """Decode steps summed over rows."""
    num_committed: int = 0
    """Tokens, those that end a prefill included."""
    num_decoded: int = 0
    """Tokens committed in decode steps."""
    num_accepted: int = 0
    num_nodes: int = 0
    num_prefill_tokens: int = 0
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0
    """What the steps were expected to take."""
    plain_steps: int = 0
    """Steps decoded plainly to measure the baseline."""
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    """What plain decoding would have taken for `plain_tokens`, by the measured bursts."""
    paired_tokens: int = 0
    paired_seconds: float = 0.0
    """What the steps next to the bursts took for `paired_tokens`."""

    def plus(self, other: "EngineTotals") -> "EngineTotals":
        """The sum, field by field."""
        return EngineTotals._make(a + b for a, b in zip(self, other, strict=True))

    def minus(self, other: "EngineTotals") -> "EngineTotals":
        """What came since `other`, field by field."""
        return EngineTotals._make(a - b for a, b in zip(self, other, strict=True))

    @classmethod
    def of(cls, totals: Mapping[str, float]) -> "EngineTotals":
        """The totals among the values of a mapping, as a report keeps them."""
        return cls(**{name: totals[name] for name in cls._fields if name in totals})  # type: ignore[arg-type]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens committed per decode step of a row."""
        return self.num_decoded / self.num_row_steps if self.num_row_steps else None

    @property
    def mean_nodes(self) -> float | None:
        """Drafted nodes per decode step of a row."""
        return self.num_nodes / self.num_row_steps if self.num_row_steps else None

    @property
    def measured_speedup(self) -> float | None:
        """Tokens per second over what plain decoding of the same rows gave; None if unmeasured."""
        return measured_speedup([self])


def measured_speedup(engines: Iterable[EngineTotals]) -> float | None:
    """How much faster the drafted steps were than plain decoding of the same rows.

    Plain decoding's time for the paired tokens over the time they took, summed over the engines
    that measured both: devices of unequal speed weigh by their own plain rate.
    """
    plain_seconds = drafted_seconds = 0.0
    for totals in engines:
        if totals.plain_tokens and totals.paired_tokens:
            plain_seconds += totals.paired_tokens * totals.plain_seconds / totals.plain_tokens
            drafted_seconds += totals.paired_seconds
    return plain_seconds / drafted_seconds if drafted_seconds else None
