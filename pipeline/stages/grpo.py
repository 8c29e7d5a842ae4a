"""Stage grpo from the command line; what it does stands in `pipeline.stages.rloo`."""

from pipeline.stages.entry import main_for

if __name__ == "__main__":
    main_for("grpo")
