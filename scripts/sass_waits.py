"""Shows which instructions of a CUDA kernel wait for which loads, by the scoreboards in its machine code.

    python scripts/sass_waits.py dfgnn/lib/libdfgnn_cuda.so gatv2_sources_kernel bfloat16Li4

prints, for every kernel whose mangled name has all the words, the loads from memory, the branches and the
instructions that wait. A warp has six scoreboards, which count loads in flight: ``sets 5`` names the one
that counts a load, ``waits 05`` those that must be zero before the instruction is issued. Loads that share
one are all waited for (benchmarks/LOG.md, G63 and G65). Tried on code for compute capability
9.0; needs ``cuobjdump``.
"""

import argparse
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

# First bits in an instruction's second word: 41 to 44 are cycles to stall, 45 is yield, then the numbers of
# two scoreboards and a mask of them.
_SETS, _READS, _WAITS, _NONE = 46, 49, 52, 7
_FIRST = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")


class Instruction(NamedTuple):
    """sets, reads: the scoreboard for its result, and for its operands, or None. waits: scoreboards."""

    text: str
    sets: int | None
    reads: int | None
    waits: tuple[int, ...]


def instructions(listing: str) -> list[Instruction]:
    """The instructions in a kernel's listing by ``cuobjdump -sass``."""
    found = []
    lines = listing.splitlines()
    for line, behind in pairwise(lines):
        if (first := _FIRST.match(line)) and (second := _SECOND.search(behind)):
            word = int(second[1], 16)
            sets, reads = (None if (k := word >> at & 7) == _NONE else k for at in (_SETS, _READS))
            waits = tuple(k for k in range(6) if word >> _WAITS + k & 1)
            found.append(Instruction(first[2], sets, reads, waits))
    return found


def kernels(text: str) -> dict[str, str]:
    """{mangled name: listing}"""
    return {part.partition("\n")[0].strip(): part for part in text.split("Function : ")[1:]}


def lines(found: list[Instruction]) -> list[str]:
    """Text for the instructions that load from memory, branch or wait, with their addresses."""
    shown = []
    for place, at in enumerate(found):
        if at.waits or any(word in at.text for word in ("LDG", "LDL", "BRA")):
            sets = "" if at.sets is None else f"sets {at.sets}"
            waits = f"waits {''.join(map(str, at.waits))}" if at.waits else ""
            shown.append(f"{place:6} {sets:7} {waits:12} {at.text}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("binary", help="a library or an object file")
    parser.add_argument("words", nargs="+", metavar="WORD", help="parts of a kernel's mangled name")
    args = parser.parse_args()
    if not Path(args.binary).is_file():
        parser.error(f"there is no file {args.binary}")
    if shutil.which("cuobjdump") is None:
        print("sass_waits: cuobjdump was not found: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    done = subprocess.run(["cuobjdump", "-sass", args.binary], capture_output=True, text=True)
    if done.returncode:
        print(f"sass_waits: {done.stderr.strip()}", file=sys.stderr)
        return 2
    chosen = {name: code for name, code in kernels(done.stdout).items() if all(w in name for w in args.words)}
    for name, code in chosen.items():
        print(name, *lines(instructions(code)), sep="\n")
    if not chosen:
        print(f"sass_waits: no kernel has {' '.join(args.words)} in its name", file=sys.stderr)
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
