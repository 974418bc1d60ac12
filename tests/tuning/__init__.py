"""The search for settings in real jobs; see `__main__.py`."""
