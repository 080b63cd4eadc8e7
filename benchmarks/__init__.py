"""Speed and memory against what a user would run instead; each a ratio within one run."""
