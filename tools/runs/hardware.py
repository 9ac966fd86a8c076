"""Names of GPUs, as people and `nvidia-smi` write them."""

from __future__ import annotations

import re

GPU_MODEL = re.compile(  # the first one named, with how many
    r"(?:\b(\d{1,4})\s{0,4}[x×*]?[\s_-]{0,4}(?:(?:NVIDIA|AMD|GeForce|Tesla)[\s_-]{0,4}){0,2}|\b)"
    r"(GH200|GB200|GB10|[HAB][1-3]00|L40S|L20Z|L40|L4|T4|V100|A6000|A10G|MI\d{3}X?|RTX[\s_-]{0,4}\d{4})(?!\d)",
    re.IGNORECASE,
)


def compact(gpu: str) -> str:
    """A name without spaces and marks, in capitals: RTX5090 for `RTX 5090`."""
    return re.sub(r"[\s_-]", "", gpu).upper()
