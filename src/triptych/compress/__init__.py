"""Stage 2. Make weights, visual tokens and cache smaller; say what it cost."""
