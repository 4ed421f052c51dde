"""Package dfgnn around the libraries that build_native.py compiles; the metadata are in pyproject.toml.

DFGNN_PURE=1: a wheel for any platform, which has the operators' schemas instead of libraries and computes in
PyTorch's operations (dfgnn/runtime/uncompiled.py). Neither a compiler nor torch is needed for it.
"""

import os
import shutil
import sys
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # those of Python 3.10's and 3.11's new environments
    raise SystemExit(
        f"error: setuptools >= 77.0.3 is needed, here is {setuptools.__version__}: "
        "pip install 'setuptools>=77.0.3' ninja, then again"
    )

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for build_native; build backends do not add it
import build_native

PURE = os.environ.get("DFGNN_PURE") == "1"


class BuildNative(Command):
    """python setup.py build_native [--only=cpu|cuda]: compile what has changed into dfgnn/lib."""

    description = "compile the libraries into the source tree"
    user_options = [("only=", None, "build one library, cpu or cuda")]

    def initialize_options(self):
        self.only = None

    def finalize_options(self):
        if self.only not in (None, "cpu", "cuda"):
            raise SystemExit(f"--only: expected cpu or cuda, got {self.only}")

    def run(self):
        for library in build_native.build(only=self.only):
            print(library)


class BuildPy(build_py):
    def run(self):
        build_native.check_place()
        if self.editable_mode:
            super().run()
            self.install(build_native.IN_PLACE)
        else:
            package = Path(self.build_lib) / "dfgnn"
            shutil.rmtree(package, ignore_errors=True)  # modules that were deleted since the last wheel
            super().run()
            self.install(package / "lib")

    def install(self, folder):
        if PURE:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(build_native.SCHEMAS, folder)
        else:
            build_native.build(folder)


class BdistWheel(bdist_wheel):
    def get_tag(self):
        # The libraries do not use Python.h, so the wheel is for any Python 3.
        if PURE:
            return "py3", "none", "any"
        return "py3", "none", f"linux_{build_native.TARGET}" if build_native.CROSS else super().get_tag()[2]


class NativeDistribution(Distribution):
    def has_ext_modules(self):
        return not PURE  # a wheel holds machine code although setuptools compiles none


try:
    setup(
        cmdclass={"build_native": BuildNative, "build_py": BuildPy, "bdist_wheel": BdistWheel},
        distclass=NativeDistribution,
    )
except build_native.BuildError as error:
    raise SystemExit(f"error: {error}") from None
