"""Runnable examples; nothing in dcp_inductor imports from here."""
