import horovod.tensorflow as hvd

hvd.init()
assert hvd.mpi_threads_supported()
from mpi4py import MPI

assert MPI.COMM_WORLD.Get_size() == hvd.size()
