"""Statistical tests that decoding leaves the target's law of tokens untouched."""
