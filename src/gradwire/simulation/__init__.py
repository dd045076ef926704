"""W virtual workers in one process: `simulate`."""
