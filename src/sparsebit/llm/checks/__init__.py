"""Is the result right: perplexity, distance from the float model, and programs that run the checkpoint."""
