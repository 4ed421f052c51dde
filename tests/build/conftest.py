import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def load_build_native():
    """A function that imports a new copy of build_native.py, which reads the environment then."""

    def load():
        spec = importlib.util.spec_from_file_location("build_native", ROOT / "build_native.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def build_native(load_build_native):
    return load_build_native()
