"""Every published way to learn from private preference labels, on beds of known truth."""
