"""What torch.compile is told about functions that build structures once and keep them."""

# Not torch.compiler.disable: that one imports the compiler when it is applied, this one at the first call.
from torch._compile import _disable_dynamo as not_compiled

__all__ = ["not_compiled"]
