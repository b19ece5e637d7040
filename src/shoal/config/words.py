"""How keys and values are written in messages."""

import json
from typing import Any

from shoal.config.locate import KeyPath


def dotted(path: KeyPath) -> str:
    """`train.optimizer.betas[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: Any) -> str:
    """A value as in YAML, shortened for messages."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
