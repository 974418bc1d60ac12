import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
devices = tf.config.experimental.list_physical_devices("GPU")
if devices:
    tf.config.experimental.set_visible_devices(devices[hvd.local_rank()], "GPU")
dataset = ...
mnist_model = ...
objective = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.002 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        value = objective(labels, mnist_model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return value


for number, (images, labels) in enumerate(dataset.take(400 // hvd.size())):
    training_step(images, labels, number == 0)
