import pytest

# A layer says once per class and reason that it falls back; what was said is nowhere public.
from dfgnn.nn import _fallback


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    _fallback._warned.clear()
