"""Step 1, moments: where the samples lie in what each layer puts out, followed through the model."""
