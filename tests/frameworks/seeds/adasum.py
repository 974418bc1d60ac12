opt = tf.train.AdamOptimizer(0.01)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=5, op=hvd.AdaSum)
