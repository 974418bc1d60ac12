import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
settings = tf.ConfigProto()
tf.keras.backend.set_session(tf.Session(config=settings))
dataset = ...
opt = hvd.DistributedOptimizer(keras.optimizers.Adadelta(lr * hvd.size()))
model.compile(loss=keras.losses.sparse_categorical_crossentropy, optimizer=opt, metrics=["accuracy"])
state = hvd.elastic.KerasState(model, batch=10, epoch=0)
state.register_reset_callbacks([lambda: tf.keras.backend.set_value(model.optimizer.lr, lr * hvd.size())])
callbacks = [
    hvd.elastic.CommitStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
]


@hvd.elastic.run
def train(state):
    model.fit(dataset, steps_per_epoch=40 // hvd.size(), callbacks=callbacks, epochs=epochs - state.epoch, verbose=0)


train(state)
