"""The run side: workspaces, exchanges and their fallbacks. Imported by op bodies only."""
