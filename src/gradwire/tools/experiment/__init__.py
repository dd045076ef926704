"""Experiments: many runs of virtual workers, named by a small TOML file, with their results in CSV files."""
