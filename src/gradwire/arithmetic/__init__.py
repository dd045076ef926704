"""What several methods compute alike: draws, groups with a scale, signs. Plain torch is the definition."""
