"""Statistical tests that decoding leaves the target's law of tokens untouched.

Gates compare single steps, tests the emitted tokens; planted faults show what both would notice.
"""
