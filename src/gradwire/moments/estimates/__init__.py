"""Step 1, moments: estimates, where no exact formula serves."""
