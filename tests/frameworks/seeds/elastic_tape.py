import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
model = ...
optimizer = tf.optimizers.Adam(lr * hvd.size())


@tf.function
def train_one_batch(data, target, allreduce=True):
    with tf.GradientTape() as tape:
        value = tf.losses.categorical_crossentropy(target, model(data, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


train_one_batch(*get_random_batch(), allreduce=False)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, epochs):
        for state.batch in range(state.batch, batches_per_epoch):
            train_one_batch(*get_random_batch())
            if state.batch % batches_per_commit == 0:
                state.commit()
        state.batch = 0


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)
state.register_reset_callbacks([lambda: optimizer.lr.assign(lr * hvd.size())])
train(state)
