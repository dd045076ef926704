"""What is held back, by parameter name: through rebuilt buckets, in checkpoints, on another number of workers."""
