"""Online private preference learning on a language model: which pairs to ask, round by round (POKL, Algorithm 2)."""
