"""A torch.compile backend that fuses the exchanges of decode context parallelism."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcp_inductor import config, ops
from dcp_inductor.errors import (
    DCPDisagreementError,
    DCPError,
    DCPMismatchError,
    DCPTimeoutError,
)

if TYPE_CHECKING:
    from dcp_inductor.explanation import explain
    from dcp_inductor.fx.dcp_pass import DcpPass
    from dcp_inductor.runtime.cuda_registry import check
    from dcp_inductor.runtime.preparation import prepare
    from dcp_inductor.runtime.registry import close, recover
    from dcp_inductor.runtime.ubatch import ubatch

__version__ = "0.1.0"
__all__ = [
    "DCPDisagreementError",
    "DCPError",
    "DCPMismatchError",
    "DCPTimeoutError",
    "DcpPass",
    "__version__",
    "check",
    "close",
    "config",
    "explain",
    "ops",
    "prepare",
    "recover",
    "ubatch",
]

# Imported when somebody asks: they need Inductor or the runtime, which the ops' schemas
# do not.
_LAZY = {
    "DcpPass": "dcp_inductor.fx.dcp_pass",
    "check": "dcp_inductor.runtime.cuda_registry",
    "close": "dcp_inductor.runtime.registry",
    "explain": "dcp_inductor.explanation",
    "prepare": "dcp_inductor.runtime.preparation",
    "recover": "dcp_inductor.runtime.registry",
    "ubatch": "dcp_inductor.runtime.ubatch",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
