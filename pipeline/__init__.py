"""RLHF alignment training under label local differential privacy."""

import logging

# Where bitsandbytes is installed peft imports it, and on some CPUs every process would begin with its advice to install
# a 4-bit kernel: one without a gradient, which is not used here (`private_rlhf.lm.quantised.keep_differentiable`).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
