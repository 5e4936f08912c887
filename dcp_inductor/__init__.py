"""A torch.compile backend that fuses the exchanges of decode context parallelism."""

from dcp_inductor import config, ops

__version__ = "0.1.0"
__all__ = ["__version__", "config", "ops"]
