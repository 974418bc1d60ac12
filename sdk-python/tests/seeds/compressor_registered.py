class Compression:
    custom = CustomCompressor
