import keras
import tensorflow as tf
from keras import backend as K
from keras.datasets import mnist
from keras.layers import Conv2D, Dense, Flatten
from keras.models import Sequential

import horovod.keras as hvd

hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))
(images, labels), test = mnist.load_data()
images = images.reshape(images.shape[0], 28, 28, 1).astype("float32") / 255
labels = keras.utils.to_categorical(labels, 10)
model = Sequential()
model.add(Conv2D(4, kernel_size=(3, 3), activation="relu", input_shape=(28, 28, 1)))
model.add(Flatten())
model.add(Dense(10, activation="softmax"))
opt = hvd.DistributedOptimizer(keras.optimizers.Adadelta(1.0 * hvd.size()))
model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
model.fit(images, labels, batch_size=8, callbacks=callbacks, epochs=2, verbose=0)
