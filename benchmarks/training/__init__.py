"""Full training steps."""
