"""Recording what a replay needs: the drafter's marginals at every position of plainly decoded texts.

The file is a NumPy archive (`.npz`): per text `N/output`, `N/log_probs`, `N/token_ids`, `N/limit`,
and once `end_ids`, `group` and `setting` (JSON).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from bastion_batch.bench.blocks import Prompt
from bastion_batch.core.acceptance import sampling_group
from bastion_batch.core.replay import RecordedText
from bastion_batch.engine import Engine
from bastion_batch.engine.drafters import Drafter, DraftRow, Marginals
from bastion_batch.errors import InputError
from bastion_batch.records import Completion, Request, SamplingParams


class Recording(NamedTuple):
    """Texts with their marginals, and what a replay must know of how they were decoded."""

    texts: tuple[RecordedText, ...]
    end_ids: frozenset[int]
    group: int
    """The sampling group of all rows."""
    setting: dict[str, Any]


class RecordingDrafter:
    """Drafts for the record only: what it proposes is kept, and nothing of it may be a candidate.

    With it every step is plain, so that every position of a text has its marginals. In everything
    else it is the drafter that it is given.

    Args:
        drafter: the one whose proposals are recorded.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._seen: dict[Prompt, Marginals] = {}
        self._nothing: Marginals | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the drafter has
        return getattr(self._drafter, name)

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """Keep the drafter's marginals; return that none of them is possible."""
        log_probs_RDK, token_ids_RDK = self._drafter.draft(rows)
        for number, row in enumerate(rows):
            self._seen[tuple(row.token_ids)] = Marginals(
                log_probs_RDK[number], token_ids_RDK[number]
            )
        impossible = Marginals(np.full_like(log_probs_RDK, -np.inf), token_ids_RDK)
        if self._nothing is None:
            self._nothing = Marginals(*(part[0] for part in impossible))
        return impossible

    def along(self, prompt: Prompt, output_ids: Prompt) -> Iterator[Marginals]:
        """What was proposed, `[D, K]`, along an output from its second token on; it is dropped.

        Where the engine saw no use in drafting, nothing was possible.
        """
        for length in range(1, len(output_ids)):
            seen = self._seen.pop((*prompt, *output_ids[:length]), self._nothing)
            assert seen is not None, "something was drafted"
            yield seen


def record(
    engine: Engine,
    drafter: RecordingDrafter,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    setting: dict[str, Any],
    progress: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Decode every prompt once, plainly, drafting at every position.

    Args:
        engine: has `drafter` as its drafter, and its method drafts in every step (`ddtree`).
        drafter: collects.
        prompts: token ids; their numbers are their noise keys, as in `LiveRows`.
        sampling: of every row.
        setting: kept with the texts.
        progress: takes a line now and then.
    """
    requests = {
        str(number): Request(
            row_id=str(number), prompt_ids=prompt, sampling=sampling, noise_key=number
        )
        for number, prompt in enumerate(prompts)
    }
    texts: dict[str, RecordedText] = {}
    for completion in engine.generate(requests.values()):
        request = requests[completion.row_id]
        marginals = list(drafter.along(request.prompt_ids, completion.output_ids))
        if marginals:
            limit = min(sampling.max_new_tokens, engine.max_context - len(request.prompt_ids))
            texts[completion.row_id] = _text(completion, limit, marginals)
        progress(f"recorded {len(texts)}/{len(requests)} texts")
    return Recording(
        texts=tuple(texts[row_id] for row_id in requests if row_id in texts),
        end_ids=frozenset() if sampling.ignore_eos else engine.target.ids.end,
        group=sampling_group(sampling),
        setting=setting,
    )


def _text(completion: Completion, limit: int, marginals: list[Marginals]) -> RecordedText:
    return RecordedText(
        np.array(completion.output_ids, np.int32),
        limit,
        np.stack([m.log_probs_RDK for m in marginals]),
        np.stack([m.token_ids_RDK for m in marginals]).astype(np.int32),
    )


def save(recording: Recording, path: Path) -> None:
    """Write the file."""
    arrays: dict[str, Any] = {
        "end_ids": np.array(sorted(recording.end_ids), np.int64),
        "group": np.array(recording.group),
        "setting": np.array(json.dumps(recording.setting)),
    }
    for number, text in enumerate(recording.texts):
        arrays[f"{number}/output"] = text.output_ids
        arrays[f"{number}/limit"] = np.array(text.max_output)
        arrays[f"{number}/log_probs"] = text.log_probs_PDK
        arrays[f"{number}/token_ids"] = text.token_ids_PDK
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> Recording:
    """Read the file.

    Raises:
        InputError: it does not exist or is no recording.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        texts = tuple(_loaded_text(arrays, n) for n in range(_num_texts(arrays)))
        return Recording(
            texts,
            frozenset(arrays["end_ids"].tolist()),
            int(arrays["group"]),
            json.loads(str(arrays["setting"])),
        )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise InputError(f"{path} is no recording of the benchmark: {error}") from None


def _num_texts(arrays: dict[str, Any]) -> int:
    return sum(name.endswith("/output") for name in arrays)


def _loaded_text(arrays: dict[str, Any], number: int) -> RecordedText:
    return RecordedText(
        arrays[f"{number}/output"],
        int(arrays[f"{number}/limit"]),
        arrays[f"{number}/log_probs"],
        arrays[f"{number}/token_ids"],
    )
