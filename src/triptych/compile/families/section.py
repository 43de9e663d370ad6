"""One object of a JSON config, read key by key; what is wrong is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from triptych.errors import CheckpointError

T = TypeVar("T")


class Section:
    """`values` as the file has them, over `defaults`: what transformers assumes where a key is absent."""

    def __init__(self, where: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.where = where  # for people, e.g. "config.json: text_config"
        self.values = {**(defaults or {}), **values}

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def over(self, values: Mapping[str, Any]) -> Section:
        """The same with some keys said anew."""
        return Section(self.where, {**self.values, **values})

    def value(self, key: str) -> Any:
        """Whatever is there; None when absent or null."""
        return self.values.get(key)

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> Section:
        """The object under `key`; empty when absent or null."""
        found = self.value(key)
        if found is not None and not isinstance(found, Mapping):
            raise self.wrong(key, "an object")
        return Section(f"{self.where}.{key}", found or {}, defaults)

    def integer(self, key: str) -> int:
        found = self.value(key)
        if not isinstance(found, int) or isinstance(found, bool):
            raise self.wrong(key, "a whole number")
        return found

    def number(self, key: str) -> float:
        found = self.value(key)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise self.wrong(key, "a number")
        return float(found)

    def flag(self, key: str) -> bool:
        """True or false; absent and null are false."""
        found = self.value(key)
        if found is not None and not isinstance(found, bool):
            raise self.wrong(key, "true or false")
        return bool(found)

    def text(self, key: str) -> str:
        found = self.value(key)
        if not isinstance(found, str):
            raise self.wrong(key, "a string")
        return found

    def triple(self, key: str) -> tuple[float, float, float]:
        """A number a colour channel."""
        found = self.value(key)
        if not isinstance(found, Sequence) or len(found) != 3 or not all(isinstance(x, int | float) for x in found):
            raise self.wrong(key, "three numbers")
        return float(found[0]), float(found[1]), float(found[2])

    def one_of(self, key: str, known: Mapping[Any, T]) -> T:
        """What `known` makes of the value. Raises CheckpointError that lists what it knows."""
        found = self.value(key)
        if isinstance(found, list | dict) or found not in known:
            choices = ", ".join(repr(choice) for choice in known)
            raise CheckpointError(f"{self.where}: {key} is {found!r}; only {choices} can be compiled")
        return known[found]

    def must_be(self, key: str, wanted: Any) -> None:
        """Refuse any other value: what it stands for is not built."""
        self.one_of(key, {wanted: wanted})

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        found = self.value(key)
        if found is None:
            return CheckpointError(f"{self.where} lacks {key}, {wanted}")
        return CheckpointError(f"{self.where}: {key} is {found!r}, not {wanted}")
