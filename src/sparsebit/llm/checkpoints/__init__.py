"""Folders with weights: how one is written block by block, checked, loaded and saved again."""
