import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
lr = tf.Variable(base_lr * hvd.size())
optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(lr))


@hvd.elastic.run
def train(state, once):
    for state.epoch in range(state.epoch, epochs):
        for state.batch in range(state.batch, batches_per_epoch):
            once()
            if state.batch % batches_per_commit == 0:
                state.commit()
        state.batch = 0


with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    state = hvd.elastic.TensorFlowState(session=session, batch=0, epoch=0)
    state.register_reset_callbacks([lambda: lr.load(base_lr * hvd.size(), session)])
    train_opt = optimizer.minimize(loss)
    train(state, lambda: session.run(train_opt))
