hvd.allreduce(tensor, op=hvd.AdaSum)
