"""The encoder service: pictures in, embedding tensors out, with the vision half of a checkpoint.

settings       flags and variables of the process
app            the process: load, prove, serve, drain
servicer       the walk of a call
messages       protobuf messages to and from the values used here
single_flight  one computation for all who wait for the same picture
cache          embeddings kept for later calls
batcher        the queue, the decode threads and the one thread of the tower
tower          what the batcher needs of a vision half, and how its failures are told
metrics        what is counted
"""
