"""Makes its result a link to a file that the verifier can read and it cannot.

Verdict: compile.sandbox
"""

import dataclasses

dataclasses.sys.modules["os"].symlink("/etc/passwd", "result.json")
