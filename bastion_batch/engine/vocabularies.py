"""Whether a drafter's own tokenizer, if its checkpoint has one, gives tokens the target's ids."""

import json
from pathlib import Path
from typing import Any

from bastion_batch.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"


def require_same_vocabulary(drafter: Path, target: Path) -> None:
    """Refuse a drafter that was trained with other token ids.

    A checkpoint without a `tokenizer.json` says nothing of it. Tokens that only one of the two has
    do not matter: a target may have been given new ones.

    Raises:
        ModelError: naming a token that the two number differently, or a file that cannot be read.
    """
    if not ((drafter / TOKENIZER_FILE).is_file() and (target / TOKENIZER_FILE).is_file()):
        return
    own, others = (_vocabulary(path / TOKENIZER_FILE) for path in (drafter, target))
    shared = own.keys() & others.keys()
    moved = sorted((own[token], token) for token in shared if own[token] != others[token])
    if moved:
        number, token = moved[0]
        raise ModelError(
            f"drafter {drafter}: its {TOKENIZER_FILE} is another one than the target's: token "
            f"{token!r} is {number} in it and {others[token]} in the target's, and so on for "
            f"{len(moved):,} tokens; it was made for another target"
        )
    if not shared:
        raise ModelError(
            f"drafter {drafter}: its {TOKENIZER_FILE} shares no token with the target's; it was "
            "made for another target"
        )


def _vocabulary(file: Path) -> dict[str, int]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = _of_model(content["model"]["vocab"])
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} cannot be read as a tokenizer: {error!r}") from None
    return vocabulary | added


def _of_model(vocabulary: Any) -> dict[str, int]:  # noqa: ANN401 - JSON
    """A mapping, or the list of pairs that unigram models have."""
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    return {token: number for number, (token, _) in enumerate(vocabulary)}
