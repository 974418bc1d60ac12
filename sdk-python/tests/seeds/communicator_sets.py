# on all ranks
from mpi4py import MPI

comm = MPI.COMM_WORLD
half = MPI.COMM_WORLD.Split(color=MPI.COMM_WORLD.rank % 2, key=MPI.COMM_WORLD.rank)

half_set = hvd.ProcessSet(half)
hvd.init(comm, process_sets=[half_set])

for each in [hvd.global_process_set, half_set]:
    print(each)

# on ranks 0 and 2
result = hvd.allreduce(tensor_for_even_ranks, process_set=half_set)

# on ranks 1 and 3
result = hvd.allreduce(tensor_for_odd_ranks, process_set=half_set)
