"""The text that every script trains and measures on; see shakespeare.py."""
