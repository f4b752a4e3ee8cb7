"""The texts that a drafter learns from: prompts, and what the target said to them.

Read from the output of one of our jobs, finished or not: what is committed counts. Its token ids
are taken where the job kept them; otherwise its text is tokenised again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bastion_batch.config import InputConfig, JobConfig, ModelConfig, OutputConfig
from bastion_batch.engine.checkpoints import ModelFiles
from bastion_batch.engine.own_text import OwnText
from bastion_batch.errors import DataError, OutputError
from bastion_batch.io.commit import committed_units, data_name
from bastion_batch.io.parquet import read_parquet
from bastion_batch.io.plan import Plan
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.planning import make_plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.reader import UnitReader
from bastion_batch.io.store import Output, Store, open_store
from bastion_batch.records import RowFault

MIN_OUTPUT_TOKENS = 2
"""A text needs an anchor and a token after it."""


class TextFiles(NamedTuple):
    """What was read."""

    texts: list[OwnText]
    num_skipped: int
    """Failed rows, and those too short to learn from."""

    @classmethod
    def joined(cls, parts: "Iterable[TextFiles]") -> "TextFiles":
        """One after the other."""
        parts = list(parts)
        texts = [text for part in parts for text in part.texts]
        return cls(texts, sum(part.num_skipped for part in parts))

    @property
    def num_tokens(self) -> int:
        """Of the outputs."""
        return sum(len(text.output_ids) for text in self.texts)

    @property
    def digest(self) -> str:
        """Equal exactly when the texts are."""
        digest = blake2b(digest_size=16)
        for text in self.texts:
            digest.update(np.array([len(text.prompt_ids), *text.token_ids]).tobytes())
        return digest.hexdigest()


def is_output(output: Output) -> bool:
    """Whether there is a job's output at this place."""
    return load_plan(output) is not None


def read_completions(
    output: Output,
    tokenizer: Any,  # noqa: ANN401
    target: ModelFiles,
    max_tokens: int,
) -> TextFiles:
    """The committed rows of a job on this target, cut to so many tokens.

    Raises:
        OutputError: there is no job, nothing is committed yet, or it was another target's.
        DataError: the output lacks the column of prompts.
    """
    store = open_store(output)
    plan = load_plan(store)
    if plan is None:
        raise OutputError(f"{store.root} is not a job's output: it has no plan")
    if plan.identity["target_digest"] != target.digest:
        raise OutputError(
            f"{store.root} holds completions of a target with digest "
            f"{plan.identity['target_digest']}; {target.name} has {target.digest}, and a drafter "
            "learns from its own target's text"
        )
    units = sorted(committed_units(store))
    renderer = PromptRenderer(_input_of(plan), tokenizer)
    end = tokenizer.eos_token_id
    rows = [row for unit in units for row in _rows(store, plan, unit)]
    texts = [_text(row, renderer, tokenizer, end, max_tokens) for row in rows]
    usable = [text for text in texts if text is not None]
    if not usable:
        raise OutputError(f"{store.root} has no completions to learn from among {len(rows)} rows")
    return TextFiles(usable, len(texts) - len(usable))


def read_prompts(
    source: InputConfig,
    tokenizer: Any,  # noqa: ANN401
    target: ModelFiles,
    limit: int,
) -> list[tuple[int, ...]]:
    """The token ids of the first prompts of a dataset; rows without a prompt are left out.

    Raises:
        DataError: it cannot be read, lacks the column, or has no usable prompt.
    """
    job = JobConfig(
        input=source, output=OutputConfig(path="unused"), model=ModelConfig(target=target.name)
    )
    plan = make_plan(job, target)
    renderer = PromptRenderer(source, tokenizer)
    prompts: list[tuple[int, ...]] = []
    with closing(UnitReader(plan)) as reader:
        for ids in _rendered(plan, reader, renderer):
            if len(prompts) == limit:
                break
            prompts.append(ids)
    if not prompts:
        raise DataError(f"input {source.path} has no usable prompt")
    return prompts


def hold_out(
    texts: Sequence[OwnText], num_prompts: int
) -> tuple[list[OwnText], list[tuple[int, ...]]]:
    """Texts to learn from, and so many prompts, spread evenly, of which none of those texts is.

    At most half of the prompts are held out.

    Raises:
        DataError: all texts are of one prompt.
    """
    prompts = list(dict.fromkeys(text.prompt_ids for text in texts))
    if len(prompts) < 2:
        raise DataError(
            f"the {len(texts)} completions are of {len(prompts)} prompt, so none can be held out; "
            "give more prompts, or others with --held-out"
        )
    places = np.linspace(0, len(prompts) - 1, min(num_prompts, len(prompts) // 2)).astype(int)
    held = [prompts[place] for place in places]
    out = set(held)
    return [text for text in texts if text.prompt_ids not in out], held


def _rendered(
    plan: Plan, reader: UnitReader, renderer: PromptRenderer
) -> Iterator[tuple[int, ...]]:
    for unit in range(plan.num_units):
        rows = reader.read(unit)
        for place, fault in enumerate(rows.faults):
            rendered = fault or renderer.render(rows.row(place))
            if not isinstance(rendered, RowFault):
                yield rendered


def _input_of(plan: Plan) -> InputConfig:
    """The identity of a planned input; where its files are does not matter here."""
    fields = {
        name.removeprefix("input."): value
        for name, value in plan.identity.items()
        if name.startswith("input.") and name != "input.files"
    }
    return InputConfig(path="planned", **fields)


def _rows(store: Store, plan: Plan, unit: int) -> list[dict[str, Any]]:
    """The prompt, as the input had it, and the answer of every row of a unit."""
    wanted = plan.identity["input.prompt"] or plan.identity["input.messages"]
    with store.open(data_name(unit)) as file:
        table = read_parquet(file)
    name = next((n for n in (wanted, f"input_{wanted}") if n in _inputs(table)), None)
    if name is None:
        raise DataError(
            f"{store.root}: its data has no column {wanted!r} with the prompts; run the job again "
            "with output.on_collision: prefix"
        )
    ours = ["output", "finish_reason", "output_token_ids"]
    columns = [name, *(n for n in ours if n in table.column_names)]
    return [{**row, wanted: row[name]} for row in table.select(columns).to_pylist()]


def _inputs(table: pa.Table) -> list[str]:
    return table.column_names[: table.column_names.index("row_id")]


def _text(
    row: Mapping[str, Any],
    renderer: PromptRenderer,
    tokenizer: Any,  # noqa: ANN401
    end: int | None,
    max_tokens: int,
) -> OwnText | None:
    """The text of a row, or None if there is nothing to learn from it."""
    if row["finish_reason"] == "error":
        return None
    prompt_ids = renderer.render(row)
    if isinstance(prompt_ids, RowFault):
        return None
    output_ids = row.get("output_token_ids")
    if output_ids is None:
        output_ids = tokenizer(row["output"], add_special_tokens=False)["input_ids"]
        if row["finish_reason"] == "stop" and end is not None:
            output_ids = [*output_ids, end]
    output_ids = tuple(output_ids[: max(0, max_tokens - len(prompt_ids))])
    return OwnText(prompt_ids, output_ids) if len(output_ids) >= MIN_OUTPUT_TOKENS else None
