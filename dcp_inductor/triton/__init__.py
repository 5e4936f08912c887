"""Triton kernels around the collectives; the one home of ``triton``, never imported
with the package.
"""
