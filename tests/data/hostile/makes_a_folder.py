"""Makes folders in folders, so that whoever cleans up must recurse.

Verdict: compile.sandbox
"""

import dataclasses

os = dataclasses.sys.modules["os"]
for _ in range(10_000):
    os.mkdir("d")
    os.chdir("d")
