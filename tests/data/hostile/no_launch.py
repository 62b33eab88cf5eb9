"""Defines no launch.

Verdict: audit.signature
Whole: yes
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    threads: Literal[32] = 32


SCHEDULES = ((1, 8192, Schedule(threads=32)),)
