"""What all of kernelmill's data has in common. Imports no torch, so that sandboxed children can use it cheaply."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of all data models: immutable, no unknown fields, NaN and infinity kept through JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces. Hashes are taken over it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
