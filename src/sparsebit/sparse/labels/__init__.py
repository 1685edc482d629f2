"""Which channels depend on each other: labels on channels, and the walk that finds them."""
