"""A module becomes a graph through torch.export."""
