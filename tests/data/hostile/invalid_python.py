"""A text that is not Python.

Verdict: audit.syntax
Whole: yes
"""

def launch(:
