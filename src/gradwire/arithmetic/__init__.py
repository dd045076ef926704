"""What several methods compute alike: draws, groups, signs. Plain torch is the definition."""
