"""What the direct ops can serve: facts that are equal on all ranks.

Nothing here looks at the rank, communicates, or touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_inductor import config

PAYLOAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be done: ``code`` is counted, ``detail`` is for people."""

    code: str
    detail: str


def combine_refusal(
    dtype: torch.dtype, lse_dtype: torch.dtype, output_dtype: torch.dtype
) -> Refusal | None:
    """Why the direct a2a_lse_reduce cannot take these dtypes, or None."""
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in PAYLOAD_DTYPES)
    if dtype not in PAYLOAD_DTYPES:
        return Refusal("dtype", f"expected partial_output of {names}, got {dtype}")
    if output_dtype not in PAYLOAD_DTYPES:
        return Refusal("dtype", f"expected output_dtype of {names}, got {output_dtype}")
    if lse_dtype not in LSE_DTYPES:
        return Refusal(
            "dtype", f"expected partial_lse of at least 16 bits, got {lse_dtype}"
        )
    return None


def rows_refusal(rows: int, max_tokens: int) -> Refusal | None:
    """Why a workspace for ``max_tokens`` rows cannot take ``rows``, or None."""
    if rows <= max_tokens:
        return None
    return Refusal(
        "rows",
        f"{rows} rows are more than the {max_tokens} of max_tokens "
        f"({config.setter('max_tokens')})",
    )
