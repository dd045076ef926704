"""The command line and what stands behind it. Nothing of the library imports it: it comes with the extra `tools`."""
