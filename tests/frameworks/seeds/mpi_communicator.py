from mpi4py import MPI
import horovod.tensorflow as hvd

half = MPI.COMM_WORLD.rank % 2
subcomm = MPI.COMM_WORLD.Split(color=half, key=MPI.COMM_WORLD.rank)
hvd.init(comm=subcomm)
print(f"rank {MPI.COMM_WORLD.rank} of all is rank {hvd.rank()} here")
