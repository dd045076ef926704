"""Step 1, moments: on a CPU, by torch and as machine code."""
