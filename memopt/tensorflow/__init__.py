"""TensorFlow and Keras: their models come in, SavedModels go out. Their libraries run in processes of their own."""
