"""Answers prompts with a loaded model: plans of answers, dialogues in batches, and answers streamed as text.

Of the other folders of `runtime`, only `integrations` imports this one.
"""
