"""`python -m private_rlhf.lm.kernels`: which kernels this machine runs, and what each needs."""

from __future__ import annotations

import torch
from private_rlhf.core.errors import print_lines
from private_rlhf.lm.kernels import KERNELS, plain, processor, runs

device = (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")).type
print_lines(f"device {device}; bfloat16: {processor().why}{'; switched off: plain PyTorch' if plain() else ''}")
for name, kernel in KERNELS.items():
    print_lines(f"{name:<12} {'runs' if runs(name, device) else '-':<5} {kernel.does}\n{'':<18} needs {kernel.needs}")
