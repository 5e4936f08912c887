"""Executable spellings of the DCP gathers and merge, and the harness that traces and
runs them.
"""
