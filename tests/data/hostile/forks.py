"""Makes a second process.

Verdict: compile.sandbox
"""

import dataclasses

dataclasses.sys.modules["os"].fork()
