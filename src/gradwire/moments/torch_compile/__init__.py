"""Step 1, moments: taps and layers as operators, for models under torch.compile."""
