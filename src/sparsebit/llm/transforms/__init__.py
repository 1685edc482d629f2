"""A model is changed before it is rounded, and its outputs stay the same.

smooth.py moves scales between layers, rotate.py rotates the residual stream.
"""
