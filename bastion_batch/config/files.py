"""How a job file, its overrides and its environment become a job."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from bastion_batch.config.job import JobConfig
from bastion_batch.errors import JobFileError


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> JobConfig:
    """Read a job file, apply ``a.b=value`` overrides, expand ``${VAR}``, and validate.

    Relative paths stay as written: `JobConfig.with_absolute_paths` resolves them.

    Raises:
        JobFileError: the file is missing, is not YAML, or does not describe a job.
    """
    file = Path(path)
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobFileError(f"job file {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(f"job file {file} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise JobFileError(f"job file {file} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise JobFileError(f"job file {file} holds {type(tree).__name__}, not a mapping")
    for override in overrides:
        _apply_override(tree, override)
    return parse_job(_expand(tree), source=str(file))


def parse_job(tree: Mapping[str, Any], source: str = "job") -> JobConfig:
    """Validate a mapping as a job.

    Raises:
        JobFileError: naming every wrong field, its value, and the nearest known name.
    """
    try:
        return JobConfig.model_validate(tree)
    except ValidationError as error:
        lines = "\n".join(f"  {_explain(e)}" for e in error.errors())
        raise JobFileError(f"{source} is not a valid job:\n{lines}") from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise JobFileError(f"--set {override!r} is not of the form section.field=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobFileError(f"--set {override!r}: the value is not YAML: {error}") from None
    at: Any = tree
    for text in keys[:-1]:
        key = _key_in(at, text, override)
        if isinstance(at, dict):
            at.setdefault(key, {})
        at = at[key]
        if not isinstance(at, dict | list):
            raise JobFileError(f"--set {override!r}: {text!r} is not a section")
    at[_key_in(at, keys[-1], override)] = value


def _key_in(section: Mapping[str, Any] | Sequence[Any], text: str, override: str) -> Any:  # noqa: ANN401
    """A name in a section, or a number in a list of them."""
    if isinstance(section, Mapping):
        return text
    if not text.isdecimal() or int(text) >= len(section):
        raise JobFileError(
            f"--set {override!r}: {text!r} is none of the {len(section)} in the list"
        )
    return int(text)


def _expand(value: Any) -> Any:  # noqa: ANN401 - any YAML value
    """Replace ``${VAR}`` inside strings by the environment's value."""
    if isinstance(value, dict):
        return {k: _expand(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v) for v in value]
    return re.sub(r"\$\{(\w+)\}", _variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    try:
        return os.environ[match[1]]
    except KeyError:
        raise JobFileError(f"the environment has no variable {match[1]}: {match[0]}") from None


def _explain(error: Mapping[str, Any]) -> str:
    location = ".".join(str(part) for part in error["loc"]) or "job"
    if error["type"] == "extra_forbidden":
        known = _known_names(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(known)}"
        return f"unknown key {location!r}{hint}"
    if error["type"] == "missing":
        return f"{location}: required, and missing"
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    is_plain = isinstance(given, str | int | float | None)
    shown = f" (given {given!r})" if is_plain and "storage_options" not in error["loc"] else ""
    return f"{location}: {message}{shown}"


def _known_names(location: Sequence[Any]) -> list[str]:
    model: type[BaseModel] = JobConfig
    for part in location:
        if isinstance(part, str):  # a number is a place in a list of sections
            annotation: Any = model.model_fields[part].annotation
            model = next(iter(get_args(annotation)), annotation)
    assert issubclass(model, BaseModel)
    return list(model.model_fields)
