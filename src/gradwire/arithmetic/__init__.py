"""What several methods compute alike: plain torch is the definition, `compiled_*` has the same bits by Numba."""
