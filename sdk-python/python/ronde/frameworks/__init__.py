"""What the modules for PyTorch, TensorFlow, Keras and JAX share. It imports none of these frameworks.

| file | what |
|---|---|
| `basics.py` | the session of a process, and queries about the process |
| `world.py` | the state of that session |
| `open_sessions.py` | the end of all sessions that a function has left open |
| `process_sets.py` | subsets of the ranks |
| `communicators.py`, `mpi.py` | ranks of mpi4py, and what programs for Horovod ask about MPI |
| `hierarchy.py` | the process sets of hierarchical Adasum |
"""
