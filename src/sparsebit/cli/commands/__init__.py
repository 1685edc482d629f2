"""One file is one command: it registers with `sparsebit.cli.app.app`, and imports heavy packages only when it runs."""
