"""Accountants of the papers' mechanisms: draws, composition of draws, primal-dual TD, private RL. Pure; no torch."""
