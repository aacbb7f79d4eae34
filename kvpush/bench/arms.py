# SPDX-License-Identifier: Apache-2.0
"""What a bench compares, and at which rates: the values of its options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpush.demo.connectors import Connector
from kvpush.errors import ConfigError
from kvpush.router import Mode

__all__ = ["DEFAULT_ARMS", "Arm", "Rate", "parse_arm", "parse_arms", "parse_rate"]

_DEFAULT_MODES: Final = {
    Connector.KVPUSH: Mode.CONCURRENT,
    Connector.NIXL_PUSH: Mode.SEQUENTIAL,
    Connector.NIXL_PULL: Mode.SEQUENTIAL,
    Connector.NONE: Mode.SEQUENTIAL,
}


@dataclass(frozen=True, slots=True)
class Arm:
    """A connector, and how its two legs are sent. Arms of one connector share its instances.

    Args:
        connector: what moves the KV.
        mode: both legs at once, or prefill first.
    """

    connector: Connector
    mode: Mode

    def __str__(self) -> str:
        default = _DEFAULT_MODES[self.connector]
        return self.connector.value if self.mode is default else f"{self.connector.value}:{self.mode.value}"


REFERENCE: Final = Arm(Connector.NONE, Mode.SEQUENTIAL)
#: Which way is better for NIXL's push depends on the case, so both.
DEFAULT_ARMS: Final = ("kvpush", "nixl-push", "nixl-push:concurrent", "nixl-pull", "none")


def parse_arm(text: str) -> Arm:
    """Read ``CONNECTOR[:MODE]``.

    Args:
        text: such as ``kvpush``, ``kvpush:sequential`` or ``nixl-push:concurrent``.

    Returns:
        The arm; without a mode the connector's usual one.

    Raises:
        ConfigError: there is no such connector or mode, or the connector can't work that way.
    """
    name, colon, mode_text = text.partition(":")
    try:
        connector = Connector(name)
    except ValueError:
        raise ConfigError(f"no connector is called {name!r}; there are {', '.join(Connector)}") from None
    if not colon:
        return Arm(connector, _DEFAULT_MODES[connector])
    try:
        mode = Mode(mode_text)
    except ValueError:
        raise ConfigError(f"{mode_text!r} is not a mode; there are {', '.join(Mode)}") from None
    if connector is Connector.NONE:
        raise ConfigError("a single instance has no legs to be sent in one way or another: none")
    if connector is Connector.NIXL_PULL and mode is Mode.CONCURRENT:
        raise ConfigError("nixl-pull needs what prefill's answer says: it can't be sent concurrently")
    return Arm(connector, mode)


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """Read several arms, and add the single instance, which outputs are compared with.

    Args:
        texts: see `parse_arm`; the default ones if there are none.

    Returns:
        The arms, each once, in the order given.

    Raises:
        ConfigError: as `parse_arm`.
    """
    arms = dict.fromkeys(parse_arm(text) for text in texts or DEFAULT_ARMS)
    arms.setdefault(REFERENCE)
    return tuple(arms)


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of requests.

    Args:
        value: requests a second, or percent of what the slowest arm can do; 0 sends one at a time.
        percent: whether it is percent.
    """

    value: float
    percent: bool = False

    def __str__(self) -> str:
        return f"{self.value:g}{'%' if self.percent else ''}"


def parse_rate(text: str) -> Rate:
    """Read a rate.

    Args:
        text: ``0``, ``1.5`` or ``70%``.

    Returns:
        The rate.

    Raises:
        ConfigError: it is negative, or no number.
    """
    number = text.strip().removesuffix("%")
    percent = number != text.strip()
    try:
        value = float(number)
    except ValueError:
        raise ConfigError(f"{text!r} is not a rate: write 0, 1.5 or 70%") from None
    if not math.isfinite(value) or value < 0 or (percent and not 0 < value <= 150):
        raise ConfigError(f"a rate must not be negative, and percents above 0 and at most 150, not {text!r}")
    return Rate(value, percent)
