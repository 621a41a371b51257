"""Decoding and replaying held against each other, block by block and in law.

A block that differs is a numeric tie, inside a noise that is measured, or a bug.
"""
