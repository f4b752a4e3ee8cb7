"""Reading keys of a configuration, so that every message names the key, its value and the limit."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from bastion_batch.errors import ModelError


class Fields:
    """Keys of one or two mappings, the first that has a key winning; null counts as absent.

    Args:
        name: what messages call the checkpoint.
        *levels: mappings, innermost first, each with the prefix that messages give its keys.
    """

    def __init__(self, name: str, *levels: tuple[str, Mapping[str, Any]]) -> None:
        self.name = name
        self._levels = levels

    def get(self, key: str) -> Any:  # noqa: ANN401 - whatever the file holds
        """The value, or None."""
        for _, level in self._levels:
            if level.get(key) is not None:
                return level[key]
        return None

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise `ModelError` about a key."""
        raise ModelError(f"{self.name}: {self._spelled(key)} {problem}")

    def require(self, key: str) -> Any:  # noqa: ANN401
        """The value of a mandatory key."""
        value = self.get(key)
        if value is None:
            self.refuse(key, "is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number; mandatory without a default."""
        value = self.get(key) if default is not None else self.require(key)
        if value is None:
            assert default is not None
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            self.refuse(key, f"is {value!r}: a whole number of at least {at_least} is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; mandatory without a default."""
        value = self.get(key) if default is not None else self.require(key)
        if value is None:
            assert default is not None
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            self.refuse(key, f"is {value!r}: a number is needed")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false; mandatory without a default."""
        value = self.get(key) if default is not None else self.require(key)
        if value is None:
            assert default is not None
            return default
        if not isinstance(value, bool):
            self.refuse(key, f"is {value!r}: true or false is needed")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of a few words; mandatory without a default."""
        value = self.get(key) if default is not None else self.require(key)
        if value is None:
            assert default is not None
            return default
        if value not in choices:
            self.refuse(key, f"is {value!r}: {', '.join(choices)} can be computed")
        return value

    def taps(self, key: str, *, lowest: int, shift: int = 0) -> tuple[int, ...]:
        """Layer numbers as `DrafterDescription.taps` counts them.

        Args:
            key: where they are.
            lowest: the smallest number the packaging allows.
            shift: what must be subtracted from the packaging's numbers.
        """
        values = self.require(key)
        if not isinstance(values, list) or not values:
            self.refuse(key, f"is {values!r}: a list of layer numbers is needed")
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                self.refuse(key, f"holds {value!r}: layer numbers begin at {lowest}")
        if len(set(values)) < len(values):
            self.refuse(key, f"is {values!r}: a layer is there twice")
        return tuple(value - shift for value in values)

    def _spelled(self, key: str) -> str:
        """The key with the prefix of the level that has it, or bare where several could have it."""
        prefixes = [prefix for prefix, level in self._levels if level.get(key) is not None]
        if not prefixes and len(self._levels) == 1:
            prefixes = [self._levels[0][0]]
        return (prefixes or [""])[0] + key


def nested_options(name: str, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A mapping inside a configuration; empty where there is none.

    Raises:
        ModelError: it is something else.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"{name}: {key} holds {type(value).__name__}, not an object")
    return value
