"""Data on disk: reading preference, demonstration and prompt files of every common format; the released bundle."""
