"""Known rewards r* beyond the embedded task's: entry points of the group `private_rlhf.truths`."""
