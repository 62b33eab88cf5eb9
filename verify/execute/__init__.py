"""Executing and timing artifacts on a GPU: bundles, the runner, its children, results.

The same modules run in place (``kernelmill verify --execute``) and in a bundle on a machine that has no more than
Python, torch, numpy and the CUDA driver bindings; so none of what ``runner.py`` and ``child.py`` import may need more.
"""
