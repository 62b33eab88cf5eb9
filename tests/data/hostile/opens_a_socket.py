"""Opens a socket.

Verdict: compile.sandbox
"""

__import__("socket").socket()
