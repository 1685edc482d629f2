"""What a command reads: models, weights, data and texts by their names on the command line."""
