"""Measuring a policy against its reference: win rates, KL, rewards, J, the Gibbs yardstick."""
