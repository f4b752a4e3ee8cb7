"""The job: its fields, their limits, and how a job file becomes one.

Every field is tagged identity or operational. Identity fields decide what the output is and are
frozen by the plan; operational fields may change from one invocation of a job to the next.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from bastion_batch.errors import JobFileError
from bastion_batch.records import Method, SamplingParams

Auto = Literal["auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


def _off_is_a_word(value: object) -> object:
    """YAML reads an unquoted ``off`` as false."""
    return "off" if value is False else value


Word = BeforeValidator(_off_is_a_word)


def identity(**kwargs: Any) -> Any:  # noqa: ANN401 - mirrors pydantic.Field
    """Declare a field that decides what the output is."""
    return Field(json_schema_extra={"identity": True}, **kwargs)


def operational(**kwargs: Any) -> Any:  # noqa: ANN401 - mirrors pydantic.Field
    """Declare a field that may change between invocations of one job."""
    return Field(json_schema_extra={"identity": False}, **kwargs)


MIN_TEMPERATURE = 1e-3
"""Below it logits divided by the temperature leave float32 no room for the noise."""


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=False,
        allow_inf_nan=False,
    )


class InputConfig(_Section):
    """Where the prompts are and how a row becomes one."""

    path: str | tuple[str, ...] = operational()
    """File, glob, directory, URL (s3://, gs://, any that fsspec knows), or a list of them;
    .jsonl and .parquet."""
    prompt: str | None = identity(default=None)
    """Column that holds the prompt's text."""
    messages: str | None = identity(default=None)
    """Column that holds a chat: a list of {role, content}."""
    system: str | None = identity(default=None)
    """System message put before every prompt."""
    chat_template: bool | Auto = identity(default="auto")
    """Wrap `prompt` as one user message; ``auto``: when the target's tokenizer has a template."""
    storage_options: dict[str, Any] = operational(default={}, repr=False)
    """What the file system of a URL needs (fsspec): credentials, an endpoint. Never shown."""

    @model_validator(mode="after")
    def _one_source(self) -> "InputConfig":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        if self.system is not None and self.chat_template is False:
            raise ValueError("`system` needs the chat template, but `chat_template` is false")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The path or paths as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class OutputConfig(_Section):
    """Where the answers go and what is written beside them."""

    path: str = operational()
    """Directory of the output, which is created, or URL: s3://, gs://, any that fsspec knows."""
    storage_options: dict[str, Any] = operational(default={}, repr=False)
    """What the file system of a URL needs (fsspec): credentials, an endpoint. Never shown."""
    steps: Annotated[str, Word] = operational(default="auto")
    """Step records: ``all``, ``sample:FRACTION`` of the rows, ``off``;
    ``auto`` is all, and a sample above 100,000 rows."""
    output_token_ids: bool = identity(default=False)
    """Add the column `output_token_ids`."""
    on_collision: Literal["error", "prefix", "drop_input"] = identity(default="error")
    """What to do with an input column that has the name of one of ours."""
    unit_rows: PositiveInt | Auto = identity(default="auto")
    """Rows committed together as one file."""

    @field_validator("steps")
    @classmethod
    def _known_steps(cls, value: str) -> str:
        kind, _, fraction = value.partition(":")
        if value in ("auto", "all", "off"):
            return value
        if kind == "sample" and re.fullmatch(r"0?\.\d+|1(\.0*)?", fraction) and float(fraction):
            return value
        raise ValueError(f"{value!r} is none of auto, all, off, sample:FRACTION (0 to 1)")


class ModelConfig(_Section):
    """The target and its drafter."""

    target: str = operational()
    """Built-in name, local directory or hub id; identity is the digest of what it holds."""
    revision: str | None = operational(default=None)
    """Revision of a hub target."""
    drafter: str | None = operational(default="default")
    """``default`` (the one built in for the target), directory, hub id, or null: no drafting."""
    probe: Annotated[Literal["auto", "off"], Word] = operational(default="auto")
    """``auto``: hold a drafter against the target's own text when the two first meet on a machine,
    and refuse it if its files describe it wrongly; ``off``: take it as it says it is."""
    dtype: Dtype = identity(default="auto")
    """One per job. ``auto``: bfloat16 on CUDA and on CPUs with bfloat16 units, else float32."""
    allow_mixed_dtype: bool = identity(default=False)
    """Let workers differ in dtype; each row then says its own, in the column `dtype`."""
    trust_remote_code: Literal[False] = operational(default=False)
    """Code from a checkpoint is never run."""


class DecodingConfig(_Section):
    """How completions are drawn. The method changes the speed and never the text."""

    method: Method = operational(default="bastion")
    """``ar`` plain, ``dflash`` chain, ``ddtree`` fixed tree, ``bastion`` adaptive tree."""
    nodes_per_row: PositiveInt = operational(default=16)
    """Drafted nodes per row of ``ddtree``."""
    max_nodes: PositiveInt = operational(default=512)
    """Most nodes of one pass, over all rows, for ``bastion``."""
    temperature: NonNegativeFloat = identity(default=0.0)
    """0 is greedy."""
    top_k: PositiveInt | None = identity(default=None)
    """Sample among the k most probable tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = identity(default=1.0)
    """Sample among the fewest tokens that hold this mass."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = identity(default=0.0)
    """Sample among tokens at least this fraction as probable as the best."""
    repetition_penalty: Annotated[float, Field(gt=0)] = identity(default=1.0)
    """Above 1 discourages tokens of prompt and output."""
    presence_penalty: float = identity(default=0.0)
    """Subtracted from the logit of a token that the output holds."""
    frequency_penalty: float = identity(default=0.0)
    """Subtracted from a token's logit for each occurrence in the output."""
    max_new_tokens: PositiveInt = identity(default=256)
    """Most tokens of a completion."""
    min_new_tokens: NonNegativeInt = identity(default=0)
    """No stop token before this many tokens."""
    logit_bias: tuple[tuple[NonNegativeInt, float], ...] = identity(default=())
    """Mapping of token ids to what is added to their logits."""
    banned_ids: tuple[NonNegativeInt, ...] = identity(default=())
    """Tokens that are never chosen, whatever their bias."""
    stop_token_ids: tuple[NonNegativeInt, ...] = identity(default=())
    """Tokens that end a completion, besides the target's own; also with ``ignore_eos``."""
    ignore_eos: bool = identity(default=False)
    """Go on after an end-of-sequence token."""
    seed: int = identity(default=0)
    """Seed of the job's sampling noise."""
    samples_per_row: Annotated[int, Field(ge=1, le=2**31 - 1)] = identity(default=1)
    """Completions of each row."""
    stop: tuple[str, ...] = identity(default=())
    """Strings that end a completion."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every completion at once")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        return tuple(value.items()) if isinstance(value, Mapping) else value

    @field_validator("logit_bias")
    @classmethod
    def _one_bias_each(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        ids = [token for token, _ in value]
        twice = sorted({token for token in ids if ids.count(token) > 1})
        if twice:
            raise ValueError(f"token {twice[0]} has more than one bias")
        return tuple(sorted(value))

    @field_validator("banned_ids", "stop_token_ids")
    @classmethod
    def _in_order(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("temperature")
    @classmethod
    def _greedy_or_warm(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"a temperature above 0 is at least {MIN_TEMPERATURE}; 0 is greedy")
        return value

    @model_validator(mode="after")
    def _min_below_max(self) -> "DecodingConfig":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        return self

    @property
    def sampling(self) -> SamplingParams:
        """The part that the engine needs for each request."""
        names = SamplingParams.__dataclass_fields__
        return SamplingParams(**{name: getattr(self, name) for name in names})


Device = Literal["auto", "cpu", "cuda"]

# What Ray takes for labels: https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
_LABEL_NAME = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = rf"(?:{_LABEL_NAME}(?:\.{_LABEL_NAME})*/)?{_LABEL_NAME}"
_LABEL_EXPRESSION = rf"!?(?:in\({_LABEL_NAME}(?:, ?{_LABEL_NAME})*\)|{_LABEL_NAME})"
_LABEL_RULE = (
    "names are of up to 63 letters, digits, dots, dashes and underscores, a letter or digit at "
    "either end"
)


class SelectConfig(_Section):
    """The machines of a pool: those that have all of this. Nothing selects every machine."""

    accelerator: tuple[str, ...] = operational(default=())
    """One of these, by any usual name: `A100`, `H100`, `RTX A6000`, ..."""
    label: dict[str, str] = operational(default={})
    """Ray labels and what they must be: ``value``, ``in(a,b)``, ``!value`` or ``!in(a,b)``; a
    machine without the label is never selected."""
    resource: dict[str, Annotated[float, Field(ge=0.0001, allow_inf_nan=False)]] = operational(
        default={}
    )
    """Ray resources, and how much of each every worker takes."""

    @field_validator("accelerator", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("label")
    @classmethod
    def _expressions(cls, value: dict[str, str]) -> dict[str, str]:
        for key, expression in value.items():
            prefix, _, _ = key.rpartition("/")
            if len(prefix) > 253 or not re.fullmatch(_LABEL_KEY, key):
                raise ValueError(f"{key!r} cannot be the key of a label in Ray; {_LABEL_RULE}")
            if not re.fullmatch(_LABEL_EXPRESSION, expression):
                raise ValueError(
                    f"{key}: {expression!r} is none of value, in(a,b), !value, !in(a,b); "
                    f"{_LABEL_RULE}"
                )
        return value

    @field_validator("resource")
    @classmethod
    def _not_ours(cls, value: dict[str, float]) -> dict[str, float]:
        for name in ("CPU", "GPU", "memory", "object_store_memory"):
            if name in value:
                raise ValueError(f"{name}: every worker takes one CPU, and one GPU if it uses CUDA")
        return value


class PoolConfig(_Section):
    """Workers that are alike."""

    name: str | None = operational(default=None)
    """For people; made of what is selected if left out."""
    select: SelectConfig = SelectConfig()
    count: PositiveInt | Auto = operational(default="auto")
    """``auto``: one per GPU of the machines selected, or one per machine if none has one; it
    follows machines that come and go."""
    device: Device = operational(default="auto")
    """``auto``: CUDA where the worker is given a GPU."""
    max_batch: PositiveInt | Auto = operational(default="auto")
    """Most rows live in one engine."""
    threads: PositiveInt | Auto = operational(default="auto")
    """CPU threads of each worker; ``auto``: the machine's cores divided by its workers."""
    price_per_hour: NonNegativeFloat | None = operational(default=None)
    """What one worker costs in dollars for every hour that it holds its place."""
    dtype: Dtype | None = operational(default=None)
    """Instead of ``model.dtype``; needs ``model.allow_mixed_dtype``."""

    @model_validator(mode="after")
    def _has_gpus(self) -> "PoolConfig":
        if self.device == "cpu" and self.select.accelerator:
            raise ValueError("`select.accelerator` needs a device other than cpu")
        return self


class WorkersConfig(_Section):
    """The processes that decode, one engine on one device each: a pool of them, or several."""

    count: PositiveInt | Auto = operational(default="auto")
    """``auto``: one per GPU of the cluster, or one per machine if it has none."""
    device: Device = operational(default="auto")
    """``auto``: CUDA where the worker is given a GPU."""
    max_batch: PositiveInt | Auto = operational(default="auto")
    """Most rows live in one engine."""
    threads: PositiveInt | Auto = operational(default="auto")
    """CPU threads of each worker; ``auto``: the node's cores divided by its workers."""
    price_per_hour: NonNegativeFloat | None = operational(default=None)
    """What one worker costs in dollars for every hour that it holds its place."""
    pools: tuple[PoolConfig, ...] = operational(default=())
    """Workers of several kinds, instead of the fields above."""
    profiles: str | None = operational(default=None)
    """Directory or URL where workers share what they measure of their devices; the output's
    own if left out."""

    @model_validator(mode="after")
    def _one_form(self) -> "WorkersConfig":
        both = sorted(self.model_fields_set - {"pools", "profiles"}) if self.pools else []
        if both:
            raise ValueError(f"give `pools` or `{'`, `'.join(both)}`, not both")
        names = [pool.name for pool in self.pools if pool.name is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two pools have the name {twice[0]!r}")
        return self

    def all_pools(self) -> tuple[PoolConfig, ...]:
        """The pools; the fields of the short form are one."""
        if self.pools:
            return self.pools
        own = {name: getattr(self, name) for name in WorkersConfig.model_fields}
        return (PoolConfig(**{k: v for k, v in own.items() if k in PoolConfig.model_fields}),)


class LimitsConfig(_Section):
    """When a finished job counts as failed, and a worker as stuck."""

    max_failed: NonNegativeInt | str = operational(default="1%")
    """Failed rows (samples counted) tolerated, a number or a percentage like ``1%``."""
    no_progress_seconds: Annotated[float, Field(gt=0)] = operational(default=300.0)
    """A worker that has rows and makes no step for so long is ended and started again, and so is
    one in which a row gets no token."""
    start_seconds: Annotated[float, Field(gt=0)] = operational(default=1800.0)
    """A worker that has not loaded its models by then is ended and started again."""

    @field_validator("max_failed")
    @classmethod
    def _count_or_percent(cls, value: int | str) -> int | str:
        if isinstance(value, str) and not re.fullmatch(r"\d+(\.\d+)?%", value):
            raise ValueError(f"{value!r} is neither a number nor a percentage like '1%'")
        if isinstance(value, str) and float(value[:-1]) > 100:
            raise ValueError(f"{value!r} is over 100%")
        return value

    def failed_rows_allowed(self, num_outputs: int) -> int:
        """The limit as a count, of so many output rows."""
        if isinstance(self.max_failed, int):
            return self.max_failed
        return int(num_outputs * float(self.max_failed[:-1]) / 100)


class JobConfig(_Section):
    """One job: a dataset of prompts in, a dataset of completions out."""

    name: str = operational(default="job")
    """For people; it appears in logs and reports."""
    input: InputConfig
    output: OutputConfig
    model: ModelConfig
    decoding: DecodingConfig = DecodingConfig()
    workers: WorkersConfig = WorkersConfig()
    limits: LimitsConfig = LimitsConfig()

    def identity_fields(self) -> dict[str, Any]:
        """The dotted names and values of the fields that decide what the output is."""
        return {
            name: getattr(section, field)
            for name, section, field, info in _leaves(self)
            if _is_identity(info)
        }

    @model_validator(mode="after")
    def _one_dtype(self) -> "JobConfig":
        for number, pool in enumerate(self.workers.pools):
            if pool.dtype is not None and not self.model.allow_mixed_dtype:
                raise ValueError(
                    f"workers.pools.{number}.dtype is {pool.dtype}, but a job has one dtype, "
                    "model.dtype, unless model.allow_mixed_dtype is true"
                )
        return self

    def with_pool(self, pool: PoolConfig) -> "JobConfig":
        """The job as the workers of one pool are to see it: as if there were no others."""
        shared = WorkersConfig.model_fields.keys() & PoolConfig.model_fields.keys()
        own = {name: getattr(pool, name) for name in shared}
        workers = WorkersConfig(**own, profiles=self.workers.profiles)
        model = self.model.model_copy(update={"dtype": pool.dtype or self.model.dtype})
        return self.model_copy(update={"workers": workers, "model": model})

    def with_absolute_paths(self, base: Path) -> "JobConfig":
        """The same job with local relative paths resolved against `base`."""
        paths = tuple(_absolute(p, base) for p in self.input.paths)
        profiles = self.workers.profiles
        return self.model_copy(
            update={
                "input": self.input.model_copy(
                    update={"path": paths[0] if isinstance(self.input.path, str) else paths}
                ),
                "output": self.output.model_copy(
                    update={"path": _absolute(self.output.path, base)}
                ),
                "model": self.model.model_copy(
                    update={
                        "target": _absolute_directory(self.model.target, base),
                        "drafter": self.model.drafter
                        and _absolute_directory(self.model.drafter, base),
                    }
                ),
                "workers": self.workers.model_copy(
                    update={"profiles": profiles and _absolute(profiles, base)}
                ),
            }
        )


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


def _leaves(job: JobConfig) -> Iterable[tuple[str, BaseModel, str, FieldInfo]]:
    for name, info in JobConfig.model_fields.items():
        value = getattr(job, name)
        if isinstance(value, BaseModel):
            for field, leaf in type(value).model_fields.items():
                yield f"{name}.{field}", value, field, leaf
        else:
            yield name, job, name, info


def _is_identity(info: FieldInfo) -> bool:
    tags = info.json_schema_extra
    assert isinstance(tags, dict), "every field is tagged"
    return bool(tags["identity"])


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str(base / Path(path).expanduser())


def _absolute_directory(name: str, base: Path) -> str:
    """A model's name, made absolute if it is the path of a directory here."""
    is_path = os.sep in name and Path(_absolute(name, base)).is_dir()
    return _absolute(name, base) if is_path else name
