"""The certificate: a file is run, timed and compared with its model."""
