"""Behaviour policies whose value functions are estimated, as safetensors, with their scores.

`tests/benchmarks/train_behaviour.py` made them.
"""
