"""What a command runs: the folder of a run, its steps, and the comparison with the float model."""
