"""Behaviour policies whose value functions are estimated, as safetensors, with their scores; `train_behaviour` made
them."""
