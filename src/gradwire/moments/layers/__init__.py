"""Step 1, moments: one file a family of layers, with its formula: a use from (input, output gradient)."""
