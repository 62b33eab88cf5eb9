"""Launch plans: the kernel launches of one workload as data.

A plan is recorded in the sandbox from the candidate's host code and is an attacker's text until :func:`parse` accepted
it: bounded sizes, known fields, every pointer an offset into a tensor of the spec.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field, ValidationError

from kernelmill.specs.data import Frozen

Dim = Annotated[int, Field(ge=1, le=2**31 - 1)]
Dim3 = tuple[Dim, Dim, Dim]

MAX_LAUNCHES = 64
MAX_PARAM_BYTES = 4096
"""Kernel parameter space in bytes that every target accepts (PTX ISA, ``.param``)."""


class Pointer(Frozen):
    """Eight parameter bytes at ``at`` that hold the address of ``tensor`` + ``offset`` bytes."""

    at: int = Field(ge=0, le=MAX_PARAM_BYTES - 8)
    tensor: str = Field(max_length=64)
    offset: int = Field(ge=0)


class Param(Frozen):
    """One kernel parameter: its bytes (hex; zero where a pointer goes) and the pointers inside it."""

    bytes: str = Field(max_length=2 * MAX_PARAM_BYTES, pattern=r"^([0-9a-f]{2})*$")
    pointers: tuple[Pointer, ...] = Field(default=(), max_length=MAX_PARAM_BYTES // 8)


class Launch(Frozen):
    """One kernel launch. ``kernel`` is the entry's name in the PTX; ``shared`` the dynamic shared memory in bytes."""

    kernel: str = Field(max_length=2048)
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    shared: int = Field(default=0, ge=0, le=256 * 1024)
    pdl: bool = False
    cooperative: bool = False
    params: tuple[Param, ...] = Field(max_length=256)


class LaunchPlan(Frozen):
    """The launches of one workload, in stream order."""

    launches: tuple[Launch, ...] = Field(min_length=1, max_length=MAX_LAUNCHES)


def parse(text: str) -> LaunchPlan:
    """Parse a recorded plan. Raises ValueError with one line saying what is wrong."""
    try:
        return LaunchPlan.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ValueError(f"launch plan: {where}: {first['msg']}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"launch plan: not JSON: {error}") from None


def short_name(kernel: str) -> str:
    """A kernel's name for a line of text. CuTe DSL appends the types of all arguments and a number to the function's
    name; what tells kernels apart is at both ends."""
    return kernel if len(kernel) <= 48 else f"{kernel[:36]}…{kernel[-8:]}"
