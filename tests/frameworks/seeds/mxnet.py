# As the documentation of Horovod shows a program for Gluon, with the names that a reader has.
import mxnet as mx
from mxnet import autograd

import horovod.mxnet as hvd

hvd.init()

context = mx.gpu(hvd.local_rank())
workers = hvd.size()

model = make_model()
model.hybridize()

opt = mx.optimizer.create("sgd", **optimizer_params)

model.initialize(initializer, ctx=context)

params = model.collect_params()
if params is not None:
    hvd.broadcast_parameters(params, root_rank=0)

trainer = hvd.DistributedTrainer(params, opt)
loss_fn = make_loss()

for epoch in range(num_epoch):
    train_data.reset()
    for nbatch, batch in enumerate(train_data, start=1):
        data = batch.data[0].as_in_context(context)
        label = batch.label[0].as_in_context(context)
        with autograd.record():
            output = model(data.astype(dtype, copy=False))
            loss = loss_fn(output, label)
        loss.backward()
        trainer.step(batch_size)
