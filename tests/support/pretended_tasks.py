"""Tasks of the tiny model on a pretended GPU."""

from __future__ import annotations

import argparse

from gpu.throughput import Task, model_config

from support.pretended_gpu import GPU


def task_of(prompts: int, response: int, minibatch: int = 2) -> Task:
    """So many prompts of 24 tokens, answered by as many tokens as may be."""
    sizes = argparse.Namespace(rollouts=prompts, minibatch=minibatch, epochs=1, prompt=24, response=response)
    return Task(model_config("llama", "tiny"), GPU, sizes)
