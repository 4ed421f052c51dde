"""The benchmark command: ``python -m dfgnn.bench``."""
