"""What everything else stands on: recipes, run directories, atomic files, statistics. Knows no model and no label."""
