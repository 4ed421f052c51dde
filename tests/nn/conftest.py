import pytest

# A layer warns once per class and reason that it falls back. Tests clear the private record of these
# warnings.
from dfgnn.nn import _fused_or_upstream


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    _fused_or_upstream._warned.clear()
