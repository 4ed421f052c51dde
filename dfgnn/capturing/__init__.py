"""Training steps as CUDA graphs, for batches of changing size: ``dfgnn.capture``."""

from .step import CapturedStep, CaptureWarning, capture

__all__ = ["CaptureWarning", "CapturedStep", "capture"]
