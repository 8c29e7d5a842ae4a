"""Accountants: public functions that turn the parameters of a mechanism into an (ε, δ) statement. Pure; no torch."""
