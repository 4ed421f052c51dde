"""scripts/sass_waits.py reads the counters out of machine code."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

# A part of a kernel's machine code for compute capability 9.0, as cuobjdump prints it.
LISTING = """
        Function : _Z6kernelv
    .headerflags    @"EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90"
        /*11c0*/                   SHFL.IDX PT, R57, R93, 0x2, 0x1c1f ;               /* 0x005c1f005d397f89 */
                                                                                      /* 0x021e2800000e0000 */
        /*1210*/                   LDG.E.128.CONSTANT R40, desc[UR10][R40.64] ;       /* 0x0000000a28287981 */
                                                                                      /* 0x008ee8000c1e9d00 */
        /*1350*/                   HMNMX2.BF16_V2 R16, R89.reuse, R40, !PT ;          /* 0x0000002859107240 */
                                                                                      /* 0x048fe40007a00000 */
        /*1910*/                   FADD R103, R18, R103 ;                             /* 0x0000006712677221 */
                                                                                      /* 0x000fca0000000000 */
        /*2d10*/                   LDG.E.CONSTANT R104, desc[UR10][R18.64] ;          /* 0x0000000a12687981 */
                                                                                      /* 0x000762000c1e9900 */
"""


@pytest.fixture
def sass_waits(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import sass_waits

    yield sass_waits
    sys.modules.pop("sass_waits", None)


def test_counters(sass_waits):
    ((name, code),) = sass_waits.kernels(LISTING).items()
    assert name == "_Z6kernelv"
    shuffle, row, maximum, add, index = sass_waits.instructions(code)
    assert shuffle == ("SHFL.IDX PT, R57, R93, 0x2, 0x1c1f", 0, None, (0, 5))
    assert (row.sets, row.reads, row.waits) == (3, None, (3,))
    assert (maximum.sets, maximum.waits) == (None, (3,))
    assert add == ("FADD R103, R18, R103", None, None, ())
    assert (index.sets, index.reads, index.waits) == (5, 3, ())


def test_what_is_shown(sass_waits):
    (code,) = sass_waits.kernels(LISTING).values()
    shown = [line.split() for line in sass_waits.lines(sass_waits.instructions(code))]
    assert [words[0] for words in shown] == ["0", "1", "2", "4"]
    assert shown[0][1:5] == ["sets", "0", "waits", "05"] and shown[3][1:4] == ["sets", "5", "LDG.E.CONSTANT"]
