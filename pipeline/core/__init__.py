"""The base of all other rooms: run directories, atomic files, statistics, label noise. It knows no model."""
