"""Speculative decoding: the reference engine, the graph engine, and what the two share."""
