"""What a command prints, and signs of life on a terminal."""
