"""The shortest program: every worker has an array, every worker gets the mean.

ronde run -np 4 --sidecars 2 python sdk-python/examples/allreduce.py
"""

import numpy as np

import ronde

with ronde.connect() as client:
    mine = np.arange(4, dtype=np.float32) + client.rank
    mean = client.allreduce(mine)
    print(f"rank {client.rank} of {client.size} has {mine}, the mean is {mean}")
    assert np.array_equal(mean, np.arange(4, dtype=np.float32) + (client.size - 1) / 2)
