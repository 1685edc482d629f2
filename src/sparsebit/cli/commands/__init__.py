"""One file is one command: it registers with `sparsebit.cli.app.app`, and imports what is heavy when it runs."""
