"""The outside world: checkpoints and heads in and out, engines' configuration out, metrics in."""
