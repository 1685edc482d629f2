"""How a model is read: its blocks, its experts, the names of its tensors, and the files with its weights."""
