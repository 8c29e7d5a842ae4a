"""PPO: pure tensor maths (advantages, losses, KL control), the rollout record, scoring, and the trainer."""
