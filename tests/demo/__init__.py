"""Scripts that made the embedded demo: its text, tokenizer, model, prompts and stores."""
