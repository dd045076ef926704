"""Step 1, moments: fused kernels that give a weight gradient and its second moment in one pass. Loaded when chosen."""
