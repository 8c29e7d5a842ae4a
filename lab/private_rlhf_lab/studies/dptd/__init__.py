"""DPTD and its baselines on Gymnasium tasks: the published noise, what it certifies, and what honest noise costs."""
