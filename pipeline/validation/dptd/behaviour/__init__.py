"""Behaviour policies whose value functions are estimated, as safetensors, with their scores.

`lab/private_rlhf_lab/benches/train_behaviour.py` made them.
"""
