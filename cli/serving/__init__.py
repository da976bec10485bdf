"""``hdtool serve``, with an engine of its own options each: hdtool's loop and vLLM."""
