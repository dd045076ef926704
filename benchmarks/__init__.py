"""Programs that measure: `python -m benchmarks cpu` (or `make bench`) and `python -m benchmarks gpu`."""
