# Each process takes the GPU of its local rank.
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
