"""Meets DDP, the optimizer and the user: `attach`, `Wire`, and the choice that "auto" makes."""
