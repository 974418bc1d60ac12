import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
dataset = ...
opt = hvd.DistributedOptimizer(tf.optimizers.Adam(0.002 * hvd.size()))
mnist_model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./saved-{epoch}.h5"))
model.fit(dataset, steps_per_epoch=40 // hvd.size(), callbacks=callbacks, epochs=2, verbose=0)
