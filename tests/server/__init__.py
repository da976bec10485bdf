"""The OpenAI-compatible server over hdtool's own loop."""
