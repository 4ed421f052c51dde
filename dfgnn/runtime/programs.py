"""Argument types for argparse, so that a wrong argument ends a program before its work begins.

Most functions here are for ``add_argument(type=...)``, or make one; lists are separated by commas.
"""

import argparse
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch


def refuse(message: str) -> NoReturn:
    """Ends the program as argparse does, for arguments that turn out to be wrong later."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def interruptible(how: str) -> Iterator[None]:
    """A context in which Ctrl-C ends the program with status 130, as in shells. how: the message to print."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted; {how}", file=sys.stderr)
        sys.exit(130)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the description's lines, and shows every argument's default."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def add_argument(self, *args, **kwargs) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        shown = action.default not in (None, False, (), "", argparse.SUPPRESS)
        if action.option_strings and shown and "%(default)" not in (action.help or ""):
            default = action.default
            text = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
            action.help = f"{action.help or ''} (default: {text.replace('%', '%%')})".strip()
        return action


def wrong(expected: str, got: Any) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, got {str(got)!r}")


def integer(least: int | None = None) -> Callable[[str], int]:
    expected = "an integer" if least is None else f"an integer of at least {least}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise wrong(expected, text) from None
        if least is not None and value < least:
            raise wrong(expected, text)
        return value

    return parse


positive = integer(1)


def number(
    above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    """The type of numbers greater than ``above``, at least ``least`` and less than ``below``; never NaN."""
    bounds = [("above", above, -math.inf), ("of at least", least, -math.inf), ("below", below, math.inf)]
    words = [f"{word} {bound:g}" for word, bound, none in bounds if bound != none]
    expected = " ".join(["a number", " and ".join(words)]).strip()

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise wrong(expected, text) from None
        if not (value > above and value >= least and value < below):
            raise wrong(expected, text)
        return value

    return parse


def listed(each: Callable[[str], Any] = str, count: int | None = None) -> Callable[[str], tuple]:
    """The type of lists: values of type ``each`` separated by commas, ``count`` of them if that is given."""

    def parse(text: str) -> tuple:
        words = text.split(",")
        if "" in words or count not in (None, len(words)):
            raise wrong(f"{'values' if count is None else f'{count} values'} separated by commas", text)
        return tuple(map(each, words))

    return parse


def one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise wrong(f"one of {', '.join(allowed)}", text)
        return text

    return parse


def device(text: str) -> str:
    """The name of a device that exists."""
    try:
        kind = torch.device(text)
    except RuntimeError:
        raise wrong("cpu, cuda or cuda:N", text) from None
    if kind.type not in ("cpu", "cuda"):
        raise wrong("cpu, cuda or cuda:N", text)
    if kind.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, but torch {torch.__version__} finds no GPU: python -m dfgnn.env says why"
            )
        if (kind.index or 0) >= count:
            raise wrong(f"cuda:0 to cuda:{count - 1}", text)
    return text


def _writable(path: Path, text: str) -> None:
    """Raises unless the nearest existing parent of `path` is a folder that may be written to."""
    place = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: {place} is not a folder")
    if not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}: {place} may not be written to")


def file_to_write(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: it is a folder, and a file was expected")
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}: the file may not be written to")
    _writable(path.absolute().parent, text)
    return path


def folder_to_write(text: str) -> Path:
    _writable(Path(text), text)
    return Path(text)


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def existing_folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


@contextlib.contextmanager
def downloading(folder: Path) -> Iterator[Path]:
    """A context for a loader that reads from ``folder`` and downloads what is missing.

    It yields a temporary folder with links to the files of ``folder``. What the loader adds moves to
    ``folder`` after it has succeeded, so that a download that fails or is interrupted leaves nothing behind.
    """
    folder = folder.absolute()
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # nothing can be downloaded, but existing files can be read
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            for path in folder.iterdir():
                if not path.name.startswith(".download-"):
                    Path(scratch, path.name).symlink_to(path)
            yield Path(scratch)
            for path in Path(scratch).iterdir():
                if not path.is_symlink() and not (folder / path.name).exists():
                    path.replace(folder / path.name)
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # a folder with files in it stays
                path.rmdir()
