"""Stage grpo from the command line; what it does stands in `private_rlhf.stages.rloo`."""

from private_rlhf.stages.entry import main_for

if __name__ == "__main__":
    main_for("grpo")
