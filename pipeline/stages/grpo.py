"""Stage grpo, which is the program of `private_rlhf.stages.rloo` with another trainer."""

from private_rlhf.stages.rloo import run

__all__ = ["run"]

if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("grpo")
