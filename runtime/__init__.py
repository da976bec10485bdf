"""The loop that answers: the target, the draft tree, acceptance, and the sources of drafts.

``decode.py`` holds the loop that everything here exists for. This room uses ``data`` alone; text,
colours and statistics are made by whoever consumes the steps.
"""
