"""The only place where a model or a graph is fed, executed, compared, timed or spilled."""
