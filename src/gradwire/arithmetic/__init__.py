"""What several methods compute alike: plain torch is the definition, `*_cpu` and `*_gpu` have the same bits."""
