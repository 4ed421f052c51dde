import pytest
from loading import load


@pytest.fixture(scope="session")
def load_build_native():
    """A function that imports a new copy of build_native.py, which reads the environment then."""
    return lambda: load("build_native.py")


@pytest.fixture(scope="session")
def build_native(load_build_native):
    return load_build_native()
