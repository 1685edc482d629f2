"""Experimental: whole blocks or branches of residual networks are removed."""
