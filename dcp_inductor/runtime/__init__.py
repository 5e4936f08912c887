"""The run side, imported by op bodies: workspaces, exchanges, fallbacks."""
