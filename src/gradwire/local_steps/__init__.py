"""Local steps: what a round is made of, which layers it takes, its error feedback, and the step of the base weights."""
