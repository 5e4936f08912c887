"""Every knob of dcp_inductor, each with its environment variable.

Precedence: an explicit argument (``options={"dcp_inductor.<knob>": ...}``) beats an assignment
to this module (``dcp_inductor.config.<knob> = ...`` or ``config.patch``), which beats the
environment variable, which beats the default. This is the only file that reads the environment.
"""

import os
import sys

from torch.utils._config_module import Config, install_config_module


def _from_env(name: str, default: int | float | str) -> int | float | str:
    """The variable read as the type of ``default``; torch's own reader knows bool and str only."""
    text = os.environ.get(name)
    if text is None:
        return default
    if isinstance(default, str):
        if text not in ("auto", "force", "disable"):
            raise ValueError(f"{name} must be auto, force or disable, got {text!r}")
        return text
    kind = type(default)
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if value <= 0:
        raise ValueError(f"{name} must be a positive {kind.__name__}, got {text!r}")
    return value


# Rewrite graphs at all. Off: the backend is plain Inductor.
enable: bool = Config(
    default=True, env_name_default="DCP_INDUCTOR_ENABLE", value_type=bool
)

# Per op: "auto" rewrites where the direct op can run and falls back otherwise, "force" raises
# where it cannot, "disable" leaves the collectives alone.
direct_combine: str = _from_env("DCP_INDUCTOR_DIRECT_COMBINE", "auto")
direct_query_gather: str = _from_env("DCP_INDUCTOR_DIRECT_QUERY_GATHER", "auto")
direct_kv_gather: str = _from_env("DCP_INDUCTOR_DIRECT_KV_GATHER", "auto")

# Rows (tokens) that a workspace holds. A call with more takes the reference collectives.
max_tokens: int = _from_env("DCP_INDUCTOR_MAX_TOKENS", 256)

# Seconds that a wait for a peer may last. Above a slow first compilation on that peer.
timeout_s: float = _from_env("DCP_INDUCTOR_TIMEOUT_S", 60.0)

# Independent slot sets for micro-batches that run on threads of their own.
num_ubatches: int = _from_env("DCP_INDUCTOR_NUM_UBATCHES", 1)

install_config_module(sys.modules[__name__])
