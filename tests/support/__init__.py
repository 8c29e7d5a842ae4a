"""What the tests share: runs, recipes, worlds, workers and files to read."""
