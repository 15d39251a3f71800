"""Typed access to configuration values that somebody else wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import ModelUnreadable

MOST = 2**19


@dataclass(frozen=True, slots=True)
class Fields:
    """Values by name; `where` tells in messages whose they are. null counts as absent."""

    where: str
    values: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """True when there is a value."""
        return self.values.get(name) is not None

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`; the default most keeps products of sizes in 63 bits.

        Raises ModelUnreadable: absent without a default, or something else.
        """
        number = self.number(name, default)
        if number != int(number) or not least <= number <= most:
            raise ModelUnreadable(f"{self.where}: {name} must be a whole number from {least} to {most}, not {number}")
        return int(number)

    def number(self, name: str, default: float | None = None) -> float:
        """A number. Raises ModelUnreadable: absent without a default, or something else."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelUnreadable(f"{self.where} does not say {name}")
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) > 2**53:
            raise ModelUnreadable(f"{self.where}: {name} must be a number, not {value!r}")
        return value

    def optional(self, name: str) -> float | None:
        """A number, or None when absent. Raises ModelUnreadable: something else."""
        return self.number(name) if self.has(name) else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers. Raises ModelUnreadable: absent, or something else."""
        given = self.values.get(name)
        if not isinstance(given, list) or not given:
            raise ModelUnreadable(f"{self.where}: {name} must be a list of numbers, not {given!r}")
        return tuple(Fields(self.where, {name: each}).number(name) for each in given)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false. Raises ModelUnreadable: something else."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelUnreadable(f"{self.where}: {name} must be true or false, not {value!r}")
        return value
