"""One small module a model framework."""
