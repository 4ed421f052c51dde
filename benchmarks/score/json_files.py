"""The files of results of all programs here but ``python -m dfgnn.bench``."""

import json
import math
from pathlib import Path
from typing import Any


def write_json(path: Path | None, results: Any) -> None:
    """Writes results to a file, making its folders; does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(_finite(results)) + "\n")


def read_json(path: Path, keys: tuple[str, ...]) -> dict:
    """Reads a file of `write_json`. Raises ValueError unless it is one whose rows have these keys."""
    try:
        found = json.loads(path.read_bytes())
        if not all(isinstance(row[key], (str, int)) for row in found["rows"] for key in keys):
            raise TypeError(f"rows without {', '.join(keys)}")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a file of results of benchmarks, got {type(error).__name__}: {error}"
        ) from error
    return found


def _text(value, indent: str = "") -> str:
    """JSON in which a list or dict is on one line if it is short or has no other inside."""
    line, inner = json.dumps(value, allow_nan=False), indent + " "
    if len(line) <= 150 or not any(bracket in line[1:] for bracket in "[{"):
        return line
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_text(item, inner)}" for name, item in value.items()]
    else:
        parts = [_text(item, inner) for item in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    body = f",\n{inner}".join(parts)
    return f"{first}\n{inner}{body}\n{indent}{last}"


def _finite(value):
    """`value` rounded to six digits, with NaN and infinity as text, because JSON has neither."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
