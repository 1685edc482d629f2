"""A user's model becomes a graph in the form that channel rules know, over the same parameters."""
