"""Decoding and replaying held against each other, block by block and in law."""
