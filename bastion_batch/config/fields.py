"""What every section of a job is made of."""

from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
Device = Literal["auto", "cpu", "cuda"]
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


class Section(BaseModel):
    """A mapping of a job file; keys that it does not know are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=False,
        allow_inf_nan=False,
    )
