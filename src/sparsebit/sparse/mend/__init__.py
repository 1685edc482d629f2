"""After the choice: weights and batch norms are adjusted so that the smaller model comes close to the whole one."""
