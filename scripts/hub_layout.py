"""Lay wheels out as a repository of the Hugging Face Hub, for its package `kernels`:

    python scripts/hub_layout.py dist/dfgnn-*-manylinux*.whl --folder build/hub

Each wheel with a library becomes a build variant: torch-stable-abi210-cpu-x86_64-linux without CUDA, or with
CUDA torch-stable-abi210-cu130-x86_64-linux, whose folder holds the package and a metadata.json. `kernels`
then finds the variant of the machine, and imports the package from there:

    from kernels import get_local_kernel
    dfgnn = get_local_kernel("build/hub")

The libraries keep the Hub's rules for the stable ABI: no Python.h, no symbol of libtorch beyond torch 2.10's
stable ABI (torch-abi-audit checks it), glibc 2.28. One rule is not kept: operators are registered as
torch.ops.dfgnn whatever the build, so that two versions cannot be loaded into one process.
"""

import json
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dfgnn.runtime.programs import Parser, existing_file, folder_to_write, refuse  # noqa: E402

CUDA = "cu130"  # the toolkit that release wheels are compiled with
ARCHS = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]


def add_variant(wheel: Path, folder: Path) -> Path:
    """Unpacks a wheel into the folder of its variant, and returns that."""
    name = re.fullmatch(r"dfgnn-([^-]+)-py3-none-.*manylinux_\d+_\d+_(x86_64|aarch64)\.whl", wheel.name)
    if name is None:
        refuse(f"{wheel}: expected a wheel for manylinux, as make release builds it")
    with zipfile.ZipFile(wheel) as archive:
        cuda = "dfgnn/lib/libdfgnn_cuda.so" in archive.namelist()
        backend = CUDA if cuda else "cpu"
        place = folder / "build" / f"torch-stable-abi210-{backend}-{name[2]}-linux"
        for member in archive.namelist():
            path = Path(member)
            if path.parts[0] == "dfgnn":
                target = place.joinpath(*path.parts[1:])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
    metadata = {
        "id": f"_dfgnn_{backend}_{re.sub('[^0-9a-z]', '_', name[1])}",
        "name": "dfgnn",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": ARCHS} if cuda else {"type": "cpu"},
    }
    (place / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return place


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=existing_file, help="wheels with libraries")
    parser.add_argument("--folder", type=folder_to_write, default=ROOT / "build/hub", help="where it goes")
    args = parser.parse_args()
    for wheel in args.wheels:
        print(add_variant(wheel, args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
