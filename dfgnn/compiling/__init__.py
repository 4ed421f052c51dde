"""``torch.compile(model, backend="dfgnn")``: attention that users wrote themselves, on dfgnn's operators."""

from .backend import backend, compile

__all__ = ["backend", "compile"]
