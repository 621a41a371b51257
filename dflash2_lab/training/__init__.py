"""Training a drafter on its target's own text: data, losses, the loop."""
