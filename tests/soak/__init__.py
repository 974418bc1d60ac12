"""A job of real processes under random faults for as long as you like; `make soak` runs it."""
