# on all ranks
hvd.init(process_sets="dynamic")
even_set = hvd.add_process_set([0, 2])
odd_set = hvd.add_process_set([1, 3])

for each in [hvd.global_process_set, even_set, odd_set]:
    print(each)

# on ranks 0 and 2
result = hvd.allreduce(tensor_for_even_ranks, process_set=even_set)

# on ranks 1 and 3
result = hvd.allreduce(tensor_for_odd_ranks, process_set=odd_set)
