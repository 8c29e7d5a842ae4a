"""Studies, accountants and benches around private-rlhf."""
