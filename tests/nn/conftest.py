import pytest

# A layer warns once per class and reason that it falls back. Tests clear the private record of these
# warnings.
from dfgnn.nn import _fallback


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    _fallback._warned.clear()
