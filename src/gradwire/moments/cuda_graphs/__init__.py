"""Step 1, moments: a model's forward and backward as CUDA graphs."""
