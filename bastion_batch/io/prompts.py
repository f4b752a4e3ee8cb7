"""From a row's prompt to the token ids of its request.

The target's own chat template turns a prompt or a chat into text, which is then tokenised as it
stands: a template writes its special tokens itself. Without a template the tokenizer's default
special tokens are added. The context limit is the engine's to check.
"""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from jinja2 import TemplateError

from bastion_batch.config import InputConfig
from bastion_batch.errors import DataError, ModelError
from bastion_batch.io.jsonl import replace_surrogates
from bastion_batch.records import RowFault

PROMPT_VERSION = 1
"""Raised when the same row would give other token ids."""

Message = dict[str, Any]


class PromptRenderer:
    """Renders the rows of one job for one tokenizer.

    Args:
        config: says which column holds what.
        tokenizer: a transformers tokenizer.

    Raises:
        ModelError: the job needs a chat template, and the tokenizer has none.
    """

    def __init__(self, config: InputConfig, tokenizer: Any) -> None:  # noqa: ANN401
        self._config = config
        self._column = config.prompt or config.messages or ""
        self._tokenizer = tokenizer
        has_template = getattr(tokenizer, "chat_template", None) is not None
        wanted = has_template if config.chat_template == "auto" else config.chat_template
        self._use_template = bool(wanted or config.messages or config.system is not None)
        if self._use_template and not has_template:
            raise ModelError(
                "the target's tokenizer has no chat template, which input.messages, input.system"
                " and input.chat_template: true need"
            )

    def render(self, row: Mapping[str, Any]) -> tuple[int, ...] | RowFault:
        """The prompt's token ids, or why there are none. No message quotes the prompt."""
        text = self.text(row)
        if isinstance(text, RowFault):
            return text
        ids = self._tokenizer(text, add_special_tokens=not self._use_template)["input_ids"]
        return tuple(ids) if ids else RowFault("empty_prompt", "the prompt has no tokens")

    def text(self, row: Mapping[str, Any]) -> str | RowFault:
        """The text that the target continues, or why there is none."""
        chat = self._messages(row) if self._config.messages else self._prompt(row)
        if isinstance(chat, str | RowFault):
            return chat
        if self._config.system is not None:
            chat = [{"role": "system", "content": self._config.system}, *chat]
        try:
            return self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = [message["role"] for message in chat]
            reason = type(error).__name__
            return RowFault(
                "invalid_prompt", f"the chat template refuses the roles {roles[:20]}: {reason}"
            )

    def _prompt(self, row: Mapping[str, Any]) -> str | list[Message] | RowFault:
        name, value = self._column, row.get(self._column)
        if value is None:
            return RowFault("null_prompt", f"column {name!r} is null")
        if not isinstance(value, str):
            kind = type(value).__name__
            return RowFault("invalid_prompt", f"column {name!r} holds {kind}, not text")
        if not value:
            return RowFault("empty_prompt", f"column {name!r} is empty")
        return [{"role": "user", "content": value}] if self._use_template else value

    def _messages(self, row: Mapping[str, Any]) -> list[Message] | RowFault:
        name, value = self._column, row.get(self._column)
        if value is None:
            return RowFault("null_prompt", f"column {name!r} is null")
        try:
            chat = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return RowFault("invalid_prompt", f"column {name!r} is not JSON")
        if not isinstance(chat, list):
            kind = type(chat).__name__
            return RowFault("invalid_prompt", f"column {name!r} holds {kind}, not a list")
        if not chat:
            return RowFault("empty_prompt", f"column {name!r} has no messages")
        messages = [_message(item) for item in chat]
        problems = [f"message {i} {m}" for i, m in enumerate(messages) if isinstance(m, str)]
        if problems:
            return RowFault("invalid_prompt", f"column {name!r}: {problems[0]}")
        return [message for message in messages if not isinstance(message, str)]


def _message(item: object) -> Message | str:
    """The message without its null fields, or what is wrong with it."""
    if not isinstance(item, Mapping):
        return f"is {type(item).__name__}, not an object of role and content"
    for name in ("role", "content"):
        if not isinstance(item.get(name), str):
            return f"has the {name} {type(item.get(name)).__name__}, not text"
    return {
        key: replace_surrogates(value) if isinstance(value, str) else value
        for key, value in item.items()
        if value is not None
    }


def require_prompt_column(schema: pa.Schema, config: InputConfig) -> None:
    """Check that the input has the column of prompts, and of a type that can hold them.

    Raises:
        DataError: naming the column, its type, or the columns that there are.
    """
    name = config.prompt or config.messages
    if name not in schema.names:
        raise DataError(f"input has no column {name!r}; its columns are {schema.names}")
    if schema.names.count(name) > 1:
        raise DataError(f"input has more than one column {name!r}")
    found = schema.field(name).type
    if pa.types.is_dictionary(found):
        found = found.value_type
    if _is_text(found) or (config.messages and _is_chat(found)):
        return
    wanted = "a list of {role, content} or JSON text" if config.messages else "text"
    raise DataError(f"column {name!r} holds {found}, not {wanted}")


def _is_text(found: pa.DataType) -> bool:
    return (
        pa.types.is_string(found)
        or pa.types.is_large_string(found)
        or pa.types.is_string_view(found)
    )


def _is_chat(found: pa.DataType) -> bool:
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    if not is_list or not pa.types.is_struct(found.value_type):
        return False
    names = {field.name for field in found.value_type}
    return {"role", "content"} <= names
