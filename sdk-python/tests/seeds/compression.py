opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.custom)
