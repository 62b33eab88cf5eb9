"""Merged kernels, one folder per family, written only by merging a pull request.

``<family>/kernel.py`` is the accepted candidate as it was offered. ``<family>/evidence/`` holds what established it:
``evidence.json`` (the verification at the merge), ``pull.json`` (how it was made) and ``report.html`` (to read).
"""
