"""Private online RL with general function approximation: Algorithms 1 and 2 of the paper, exact and small."""
