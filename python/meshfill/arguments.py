"""Checks of arguments, before anything is sent. Each raises a ValueError that names the argument."""

import math
import numbers
import operator
import re
from typing import Any

_HEADER_KEY = re.compile(r"[0-9a-z_.-]+")


def whole(name: str, value: Any, least: int = 0, most: int = 2**32 - 1) -> int:
    """A whole number from least to most, both included; those of NumPy are taken, too."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, not a whole number") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; give {least} to {most}")
    return number


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not text")
    return value


def seconds(name: str, value: Any) -> float:
    """A finite number of seconds, 0 or more."""
    if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; give seconds, 0 or more")
    return float(value)


def header_text(name: str, value: Any) -> str:
    """What HTTP/2 carries as a header: printable ASCII. The error does not repeat the value, which may be a secret."""
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
        raise ValueError(f"{name} cannot be sent as a header; give text of printable ASCII characters")
    return value


def header_pair(name: str, pair: Any) -> tuple:
    """(key, value) of a header. Values of keys that end with -bin are bytes."""
    try:
        key, value = pair
    except (TypeError, ValueError):
        raise ValueError(f"{name} is no sequence of pairs; give pairs of a key and a value") from None
    if not isinstance(key, str) or not _HEADER_KEY.fullmatch(key):
        raise ValueError(f"{name} has the key {key!r}; give lower-case letters, digits, _, . and -")
    if not key.endswith("-bin"):
        header_text(f"{name}: {key}", value)
    elif not isinstance(value, bytes):
        raise ValueError(f"{name}: the value of {key} is not bytes")
    return key, value
